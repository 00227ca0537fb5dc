"""Settings in which a phase runs: without autocast, and on side streams. The caller's are restored
after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from lather.device import gpu_module, is_gpu

T = TypeVar("T")

SideStreams = dict[tuple[int, torch.device], Any]
"""Side streams by number and device. All steps use the same streams, because torch's allocator
caches memory per stream."""

BESIDE = -1
"""Number of the side stream for work that runs while the caller goes on."""


@contextmanager
def no_autocast() -> Iterator[None]:
    """Compute in the dtypes of the operands, even inside a caller's autocast block."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def beside(streams: SideStreams, changed: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Run the block's work, which may change the tensors `changed`, on a side stream of the GPU
    `device`. It begins after all work that the caller's stream has been given, and `join` makes
    that stream wait for it. On a CPU the work is done immediately."""
    if not is_gpu(device):
        yield
        return
    stream = after_the_caller(streams, BESIDE, device)
    for x in changed:
        x.record_stream(stream)
    with gpu_module(device).stream(stream):
        yield


def join(streams: SideStreams) -> None:
    """Make the caller's stream of each device wait for the work of `beside`."""
    for (number, device), stream in streams.items():
        if number == BESIDE:
            gpu_module(device).current_stream(device).wait_stream(stream)


def on_streams(
    items: Iterable[T], streams: SideStreams, num_streams: int, device: torch.device
) -> Iterator[T]:
    """Yield the items. On a GPU, `num_streams` side streams in turn are the current stream, and at
    the end the caller's stream waits for all of them. The items must not depend on
    each other."""
    if num_streams == 1 or not is_gpu(device):
        yield from items
        return
    used = [after_the_caller(streams, number, device) for number in range(num_streams)]
    current = gpu_module(device).current_stream(device)
    try:
        for item, stream in zip(items, cycle(used), strict=False):
            with gpu_module(device).stream(stream):
                yield item
    finally:
        for stream in used:
            current.wait_stream(stream)


def after_the_caller(streams: SideStreams, number: int, device: torch.device) -> Any:
    """Return a side stream whose further work begins after all work that the caller's stream has
    been given."""
    stream = streams.get((number, device))
    if stream is None:
        stream = streams[number, device] = gpu_module(device).Stream(device)
    stream.wait_stream(gpu_module(device).current_stream(device))
    return stream
