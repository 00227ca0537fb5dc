"""Which implementation of an operation runs: Triton's on GPU tensors, the torch reference everywhere else."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from lather.device import is_gpu


def use_triton(*tensors: Tensor) -> bool:
    """True if all tensors are on a GPU and Triton is installed. Triton itself is imported by the caller, only then."""
    return all(is_gpu(tensor) for tensor in tensors) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
