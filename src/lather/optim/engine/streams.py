"""The device settings under which a phase runs: no autocast, streams. All are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from lather.device import gpu_module, is_gpu

T = TypeVar("T")

SideStreams = dict[int, Any]
"""Side streams by number, kept from step to step: the allocator keeps memory per stream."""

BESIDE = -1
"""Number of the stream for work that goes on beside whatever the caller does next."""


@contextmanager
def no_autocast() -> Iterator[None]:
    """Arithmetic in the dtypes of its operands, also inside a caller's autocast block."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def beside(streams: SideStreams, changed: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Run the block's work, which may change the tensors `changed`, on a side stream of the GPU `device`: it begins after what the
    caller's stream has by now, and that stream waits for it in `join`. On the CPU all is done at once."""
    if not is_gpu(device):
        yield
        return
    stream = _after_the_caller(streams, BESIDE, device)
    for x in changed:
        x.record_stream(stream)
    with gpu_module(device).stream(stream):
        yield


def join(streams: SideStreams) -> None:
    """The caller's stream waits for what goes on beside it."""
    if BESIDE in streams:
        gpu_module(streams[BESIDE].device).current_stream().wait_stream(streams[BESIDE])


def on_streams(items: Iterable[T], streams: SideStreams, num_streams: int, device: torch.device) -> Iterator[T]:
    """The items one after the other; on a GPU with the next of `num_streams` side streams as the current one. At the end the caller's
    stream waits for them all. Work on different items must not depend on each other."""
    if num_streams == 1 or not is_gpu(device):
        yield from items
        return
    used = [_after_the_caller(streams, number, device) for number in range(num_streams)]
    current = gpu_module(device).current_stream()
    try:
        for item, stream in zip(items, cycle(used), strict=False):
            with gpu_module(device).stream(stream):
                yield item
    finally:
        for stream in used:
            current.wait_stream(stream)


def _after_the_caller(streams: SideStreams, number: int, device: torch.device) -> Any:
    """A side stream, whose work begins after what the caller's has by now."""
    if number not in streams:
        streams[number] = gpu_module(device).Stream()
    streams[number].wait_stream(gpu_module(device).current_stream())
    return streams[number]
