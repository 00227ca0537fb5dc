"""The device settings under which a phase runs: no autocast, CUDA streams. All are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SideStreams = dict[int, torch.cuda.Stream]
"""Side streams by number, kept from step to step: the allocator keeps memory per stream."""

BESIDE = -1
"""Number of the stream for work that goes on beside whatever the caller does next."""


@contextmanager
def no_autocast() -> Iterator[None]:
    """Arithmetic in the dtypes of its operands, also inside a caller's autocast block."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def beside(streams: SideStreams, changed: Iterable[Tensor]) -> Iterator[None]:
    """Run the block's CUDA work on a side stream: it begins after what the caller's stream has by now, and that stream waits for it in
    `join`. The work may change the tensors `changed`. Without CUDA all is done at once."""
    if not torch.cuda.is_initialized():
        yield
        return
    stream = _after_the_caller(streams, BESIDE)
    for x in changed:
        if x.is_cuda:
            x.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


def join(streams: SideStreams) -> None:
    """The caller's stream waits for what goes on beside it."""
    if BESIDE in streams:
        torch.cuda.current_stream().wait_stream(streams[BESIDE])


def on_streams(items: Iterable[T], streams: SideStreams, num_streams: int) -> Iterator[T]:
    """The items one after the other; where CUDA is in use, with the next of `num_streams` side streams as the current one. At the end the
    caller's stream waits for them all. Work on different items must not depend on each other."""
    if num_streams == 1 or not torch.cuda.is_initialized():
        yield from items
        return
    current, used = torch.cuda.current_stream(), [_after_the_caller(streams, number) for number in range(num_streams)]
    try:
        for item, stream in zip(items, cycle(used), strict=False):
            with torch.cuda.stream(stream):
                yield item
    finally:
        for stream in used:
            current.wait_stream(stream)


def _after_the_caller(streams: SideStreams, number: int) -> torch.cuda.Stream:
    """A side stream, whose work begins after what the caller's has by now."""
    if number not in streams:
        streams[number] = torch.cuda.Stream()
    streams[number].wait_stream(torch.cuda.current_stream())
    return streams[number]
