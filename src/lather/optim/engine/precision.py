"""The device settings under which a phase runs: fp32 matmul precision, no autocast, CUDA streams. All are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

FP32_PRECISION = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
"""torch's three levels, for cuBLAS and for oneDNN."""


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """fp32 matmul precision ("highest" | "high" | "medium", as torch names them) inside the block, the caller's own after it.

    Set per backend: reading `torch.get_float32_matmul_precision` raises once a caller has set it that way.
    """
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend, value in zip(backends, FP32_PRECISION[precision], strict=True):
            backend.fp32_precision = value
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


@contextmanager
def no_autocast() -> Iterator[None]:
    """Arithmetic in the dtypes of its operands, also inside a caller's autocast block."""
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


T = TypeVar("T")

SideStreams = dict[int, torch.cuda.Stream]
"""Side streams by number, kept from step to step: the allocator keeps memory per stream."""

BESIDE = -1
"""Number of the stream for work that goes on beside whatever the caller does next."""


@contextmanager
def beside(streams: SideStreams, changed: Iterable[Tensor]) -> Iterator[None]:
    """What CUDA is given inside begins after what the caller's stream has by now, and the caller's stream waits for it in `join`. It may
    change the tensors `changed`. Without CUDA all is done at once."""
    if not torch.cuda.is_initialized():
        yield
        return
    if BESIDE not in streams:
        streams[BESIDE] = torch.cuda.Stream()
    streams[BESIDE].wait_stream(torch.cuda.current_stream())
    for x in changed:
        if x.is_cuda:
            x.record_stream(streams[BESIDE])
    with torch.cuda.stream(streams[BESIDE]):
        yield


def join(streams: SideStreams) -> None:
    """The caller's stream waits for what goes on beside it."""
    if BESIDE in streams:
        torch.cuda.current_stream().wait_stream(streams[BESIDE])


def on_streams(items: Iterable[T], streams: SideStreams, num_streams: int) -> Iterator[T]:
    """The items one after the other; where CUDA is in use, with the next of `num_streams` side streams as the current one. At the end the
    caller's stream waits for them all. Work on different items must not depend on each other.
    """
    if num_streams == 1 or not torch.cuda.is_initialized():
        yield from items
        return
    current = torch.cuda.current_stream()
    for number in range(num_streams):
        if number not in streams:
            streams[number] = torch.cuda.Stream()
    used = [streams[number] for number in range(num_streams)]
    for stream in used:
        stream.wait_stream(current)
    try:
        for item, stream in zip(items, cycle(used), strict=False):
            with torch.cuda.stream(stream):
                yield item
    finally:
        for stream in used:
            current.wait_stream(stream)
