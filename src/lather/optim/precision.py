"""The device settings under which a phase runs: fp32 matmul precision, no autocast, CUDA streams. All are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any, TypeVar

import torch

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
def no_autocast(device_types: Iterable[str]) -> Iterator[None]:
    """Arithmetic in the dtypes of its operands, also inside a caller's autocast block."""
    with ExitStack() as stack:
        for device_type in set(device_types):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


T = TypeVar("T")


def on_streams(items: Iterable[T], device: torch.device, num_streams: int) -> Iterator[T]:
    """The items one after the other; on CUDA the work on each goes to the next of `num_streams` side streams, and at the end the current
    stream waits for them all. Work on different items must not depend on each other.
    """
    if device.type != "cuda" or num_streams == 1:
        yield from items
        return
    current = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(num_streams)]
    for stream in streams:
        stream.wait_stream(current)
    try:
        for item, stream in zip(items, cycle(streams), strict=False):
            with torch.cuda.stream(stream):
                yield item
    finally:
        for stream in streams:
            current.wait_stream(stream)
