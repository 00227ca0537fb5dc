"""Choice of the implementation of an operation: Triton for GPU tensors, the torch reference for all
others. Also the dtype in which references compute, the blocks of rows that they process, and matrix
products whose result is wider than the operands, which torch has on GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from lather.device import is_gpu

HAS_TRITON = importlib.util.find_spec("triton") is not None

P = ParamSpec("P")
R = TypeVar("R")


def run(operation: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Run the fastest implementation of an operation of a `reference.py` for the tensors among the
    arguments."""
    tensors = (x for x in arguments if isinstance(x, Tensor))
    return fastest(operation, *tensors)(*arguments, **options)


def fastest(
    operation: Callable[P, R], *tensors: Tensor, in_reference: bool = False
) -> Callable[P, R]:
    """Return an operation of a `reference.py`, or that of the same name in the `triton.py` beside
    it if the tensors are on a GPU; with `in_reference` always the first, for tensors that the
    kernel does not take."""
    if in_reference or not use_triton(*tensors):
        return operation
    package = operation.__module__.rpartition(".")[0]
    kernels = importlib.import_module(f"{package}.triton")
    return cast(Callable[P, R], getattr(kernels, operation.__name__))


def use_triton(*tensors: Tensor) -> bool:
    """Tell whether all tensors are on a GPU and Triton is installed. Callers import Triton only if
    this is true."""
    return HAS_TRITON and all(is_gpu(tensor) for tensor in tensors)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which an operation on `x` is computed: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def blocks(x_RD: Tensor, elements: int) -> Iterator[slice]:
    """Yield the rows of blocks of a matrix that have at most `elements` elements, but at least one
    row."""
    num_rows = max(elements // max(x_RD.shape[1], 1), 1)
    return (slice(start, start + num_rows) for start in range(0, len(x_RD), num_rows))


def wide_product(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the fp32 product of two bf16, fp16 or fp32 matrices on a GPU, whose sums are not
    rounded to the operands' dtype. With `total` (fp32) the kernel adds the product to it in
    place."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
