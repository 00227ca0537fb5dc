"""The precision of fp32 products inside the optimizer, apart from what the caller has set for the model.

torch keeps it twice, process-wide: as one word (`torch.set_float32_matmul_precision`, `allow_tf32`), which compiled code looks at, and per
backend (`fp32_precision`), which products go by. To read the word raises where the two disagree, so a change here is of both, and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lather.device import is_gpu


def precision_on(device: torch.device, precision: str) -> str:
    """What "auto" stands for on the device; anything else is as it is."""
    if precision != "auto":
        return precision
    return "high" if is_gpu(device) else "highest"


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """fp32 matmul precision ("highest" | "high" | "medium", as torch names them) inside the block, the caller's own after it."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    word = _word(backends)
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(word)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def _word(backends: tuple[Any, ...]) -> str:
    """The caller's word for all backends, which agrees with fp32 in each of them whatever it is; leaves them at fp32."""
    for backend in backends:
        backend.fp32_precision = "ieee"
    return torch.get_float32_matmul_precision()
