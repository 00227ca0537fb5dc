"""Choice of the implementation of an operation: Triton for GPU tensors, the torch reference for all others."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from lather.device import is_gpu


def use_triton(*tensors: Tensor) -> bool:
    """Whether all tensors are on a GPU and Triton is installed. Callers import Triton only if this is true."""
    return all(is_gpu(tensor) for tensor in tensors) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
