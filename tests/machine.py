"""Says on what, besides its numbers, the bits of a result depend: this torch on this processor
decides how matrix products are rounded."""

import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Describe the machine: equal bits can be expected only where all of this is equal."""
    return {
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }


def _cpu() -> str:
    """Return the processor's name, with the numbers that tell apart processors of one name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().partition("\n\n")[0].splitlines() if file.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{key} {said[key]}" for key in ("cpu family", "model", "stepping") if key in said]
    return ", ".join([said.get("model name", platform.processor() or platform.machine()), *numbers])
