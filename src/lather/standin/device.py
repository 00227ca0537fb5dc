"""A device without memory or arithmetic that torch and Lather treat as a GPU, so that code branches
as on CUDA; or as a CPU.

It is registered with torch as "standin", or as "cpu_standin". Its tensors are fake (shape, dtype
and device, but no elements); `mode` creates them. Streams and events exist but order nothing; they
report waits of the host to a listener.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import torch

from lather.device import STANDINS, Read
from lather.torch_private import register_python_device

NAMES: dict[str, str] = dict(zip(("gpu", "cpu"), STANDINS, strict=True))
"""Name of the device, by the kind of device that it replaces."""

HOPPER = (9, 0)
"""Compute capability that the device reports."""


def returning(value: object) -> Callable[..., Any]:
    """Return a method that ignores its arguments and always returns the value."""
    return lambda self, *args, **options: value


class StandInStream:
    """A queue that is always empty."""

    wait_stream = wait_event = returning(None)
    query = returning(True)

    def __init__(self, device: object = None, priority: int = 0) -> None: ...

    @property
    def device(self) -> torch.device:
        return standin()

    def synchronize(self) -> None:
        module.waited("stream.synchronize()")

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        return event or StandInEvent()


class StandInEvent:
    """An event that has always occurred already."""

    record = wait = returning(None)
    query = returning(True)
    elapsed_time = returning(0.0)

    def __init__(self, enable_timing: bool = False, **options: bool) -> None: ...

    def synchronize(self) -> None:
        module.waited("event.synchronize()")


class StandIn:
    """The module that `torch.get_device_module("standin")` returns: the part of `torch.cuda` that a
    training step uses."""

    Stream, Event = StandInStream, StandInEvent
    nvtx = SimpleNamespace(
        range=lambda *_: nullcontext(),
        range_push=lambda *_: 0,
        range_pop=lambda: 0,
        mark=lambda *_: None,
    )
    device = stream = device_of = returning(nullcontext())
    is_available = is_initialized = is_bf16_supported = returning(True)
    _is_in_bad_fork = returning(False)
    current_stream = default_stream = returning(StandInStream())
    current_device = returning(0)
    device_count = returning(1)
    get_device_capability = returning(HOPPER)
    get_amp_supported_dtype = returning([torch.bfloat16, torch.float16])
    set_device = set_stream = empty_cache = reset_peak_memory_stats = manual_seed_all = returning(
        None
    )
    """There is a single device, without state."""

    def __init__(self) -> None:
        self.waited: Callable[[str], None] = lambda what: None
        """Called when the host waits."""
        self.launched: Callable[..., None] = lambda *given, **options: None
        """Called when a kernel is launched that is no operation of torch."""
        self.peak: Callable[[], int] = lambda: 0
        """Returns the value of `max_memory_allocated`."""
        self.read: Callable[[torch.Tensor, Read, bool], torch.Tensor]
        """Returns the values of `lather.device.read`."""
        self.positions: Callable[[torch.Tensor, Read], tuple[torch.Tensor, ...]]
        """Returns those of `lather.device.positions`."""
        self.masked: Callable[[torch.Tensor, torch.Tensor, Read], torch.Tensor]
        """Returns those of `lather.device.masked`."""
        self.memory = 141 * 10**9
        """Bytes of the device; those of an H200."""

    def synchronize(self, device: object = None) -> None:
        self.waited("synchronize()")

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # as many bytes as CUDA's

    def max_memory_allocated(self, device: object = None) -> int:
        return self.peak()

    memory_allocated = max_memory_allocated

    def get_device_name(self, device: object = None) -> str:
        return standin().type

    def get_device_properties(self, device: object = None) -> Any:
        sizes = {
            "multi_processor_count": 132,
            "total_memory": self.memory,
            "L2_cache_size": 50 * 2**20,
        }
        return SimpleNamespace(name=standin().type, major=HOPPER[0], minor=HOPPER[1], **sizes)


module = StandIn()


def standin(stands_for: Literal["gpu", "cpu"] | None = None) -> torch.device:
    """Return the device, which is registered with torch at the first call; None: the kind that is
    registered, else a GPU.

    Registration cannot be undone, and a process cannot register a second device, so use the process
    for counting and planning only. Raises RuntimeError if the other kind is registered.
    """
    registered = next((kind for kind, name in NAMES.items() if hasattr(torch, name)), None)
    if registered is None:
        register_python_device(NAMES[stands_for or "gpu"], module)
    elif stands_for not in (None, registered):
        raise RuntimeError(
            f"the stand-in device stands for a {registered} in this process: use another process "
            f"for a {stands_for}"
        )
    return torch.device(NAMES[registered or stands_for or "gpu"], 0)
