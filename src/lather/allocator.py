"""Settings of torch's allocator of GPU memory, in environment variables.

torch's allocator keeps what is freed, in segments of the sizes in which they were allocated. Under
expert parallelism every exchange has another size, so that segments fit less and less, until the
allocator returns them to the driver, for which the host waits for the whole device, and begins
anew. Expandable segments are ranges of addresses instead, which grow and are divided as needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with settings. torch 2.11 to 2.13 read the first that is set (the last with
AMD's GPUs only), when the allocator is first used."""
EXPANDABLE = "expandable_segments:True"


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, whether torch can use it or not."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which torch's allocator uses expandable segments.

    No variables if the user has set any of them, or without an NVIDIA GPU: elsewhere torch may not
    have expandable segments, and would warn. They have to be set before CUDA is used; child
    processes inherit them.
    """
    if any(name in environment for name in VARIABLES) or not has_nvidia_gpu():
        return {}
    return {"PYTORCH_ALLOC_CONF": EXPANDABLE}


def allocator_settings(environment: Mapping[str, str]) -> str:
    """Return the settings that torch reads on an NVIDIA GPU; empty: its defaults."""
    return next((environment[name] for name in VARIABLES[:2] if name in environment), "")
