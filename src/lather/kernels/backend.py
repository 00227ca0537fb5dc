"""Choice of the implementation of an operation: Triton for GPU tensors, the torch reference for all others."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch import Tensor

from lather.device import is_gpu

P = ParamSpec("P")
R = TypeVar("R")


def run(operation: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """The result of an operation of a `reference.py`; of that of the same name in the `triton.py` beside it, if it has arguments on a GPU.

    All tensors among `arguments` have to be there.
    """
    if use_triton(*(x for x in arguments if isinstance(x, Tensor))):
        package = operation.__module__.rpartition(".")[0]
        operation = cast(Callable[P, R], getattr(importlib.import_module(f"{package}.triton"), operation.__name__))
    return operation(*arguments, **options)


def use_triton(*tensors: Tensor) -> bool:
    """Whether all tensors are on a GPU and Triton is installed. Callers import Triton only if this is true."""
    return all(is_gpu(tensor) for tensor in tensors) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
