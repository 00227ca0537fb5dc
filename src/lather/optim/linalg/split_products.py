"""Products of fp32 matrices on a GPU as three products of bf16 matrices, with sums in fp32.

Source: Markidis et al. 2018 (arXiv:1803.04014), in bf16 Henry, Tang, Heinecke 2019
(arXiv:1904.06376). A matrix is hi + mid + a rest: hi = bf16(x), mid = bf16(x - hi), and the rest is
at most 2^-16 of each element. Of the product of two such matrices

    a b = hi_a hi_b + hi_a mid_b + mid_a hi_b + ...

the three named terms are computed, the small ones first. What is left out is at most 3 * 2^-16 of
each product of two elements, so that the error of an element is relative to sum_k |a_ik b_kj|: 5e-6
for random matrices (measured, Frobenius norm, n = 1,024 to 4,096), where true fp32 has 6e-7 and
TF32 3e-4. bf16 has the exponents of fp32, so that nothing overflows; an infinite element makes mid
NaN, and so what it is multiplied into. Elements below 1e-33 lose mid.

Trade-off: a third to a quarter of the time of true fp32, which has no tensor cores; the parts take
as much memory as the matrix. A matrix is split once, however many products it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lather.device import STANDINS, is_gpu, is_nvidia
from lather.kernels.split_parts import split_parts
from lather.shapes import Float
from lather.torch_private import get_fp32_precision

SPLIT_ERROR = 5e-6
"""Relative error (Frobenius) of a split product of random matrices."""

LEAST_SIZE = 512
"""Least number of rows and columns of square matrices that are split. Products of smaller ones take
little time, and fewer elements average the errors."""

ALIGNED = 8
"""Elements of bf16 in 16 bytes, of which a row has to be a multiple for the tensor cores."""


@dataclass(frozen=True)
class SplitMatrix:
    """A batch of fp32 matrices, or a view of it, as the sum of two in bf16."""

    hi: Float[Tensor, "b m n"]
    mid: Float[Tensor, "b m n"]

    def map(self, function: Callable[[Tensor], Tensor]) -> SplitMatrix:
        """Apply a function that moves elements to both parts."""
        return SplitMatrix(function(self.hi), function(self.mid))

    def __getitem__(self, index: tuple[slice, ...]) -> SplitMatrix:
        return self.map(lambda part: part[index])

    @property
    def mT(self) -> SplitMatrix:  # noqa: N802 - torch's name
        """The transposed matrices."""
        return self.map(lambda part: part.mT)


Operand = Tensor | SplitMatrix


def has_wide_products(x: Tensor) -> bool:
    """Tell whether torch has batched products of bf16 with results in fp32 on the device of `x`:
    on NVIDIA's GPUs."""
    return is_nvidia(x) or (is_gpu(x) and x.device.type in STANDINS)


def is_split(x: Float[Tensor, "b n n"]) -> bool:
    """Tell whether products of square matrices like `x` are split: on a GPU, where products of fp32
    are in true fp32, and if the matrices are large and aligned."""
    n = x.shape[-1]
    return (
        has_wide_products(x)
        and x.dtype == torch.float32
        and n >= LEAST_SIZE
        and n % ALIGNED == 0
        and get_fp32_precision("cuda", "matmul") != "tf32"
    )


def operand(x: Float[Tensor, "b m n"], *, split: bool) -> Operand:
    """Return `x` as an operand of products: its parts, or without `split` itself."""
    if not split:
        return x
    parts = empty_split(x)
    write_split(parts, x)
    return parts


def empty_split(x: Float[Tensor, "b m n"]) -> SplitMatrix:
    """Return memory for the parts of matrices like `x`, with contiguous rows."""
    options: Any = {"dtype": torch.bfloat16, "device": x.device}
    return SplitMatrix(*(torch.empty(x.shape, **options) for _ in range(2)))


def write_split(parts: Operand, x: Float[Tensor, "b m n"]) -> None:
    """Write the parts of `x` into `parts`, unless that is a plain matrix."""
    if isinstance(parts, SplitMatrix):
        split_parts(x, parts.hi, parts.mid)


def split_product(a: Operand, b: Operand, out: Tensor | None = None) -> Float[Tensor, "b m n"]:
    """Return the product of two operands, in a new tensor or in `out`: of split matrices by their
    parts, of plain ones by torch's product."""
    if isinstance(a, SplitMatrix) and isinstance(b, SplitMatrix):
        options = {} if out is None else {"out": out}
        total = torch.bmm(a.mid, b.hi, out_dtype=torch.float32, **options)
        _add_(total, a.hi, b.mid, 1)
        return _add_(total, a.hi, b.hi, 1)
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a @ b if out is None else torch.bmm(a, b, out=out)


def add_product_(total: Float[Tensor, "b m n"], a: Operand, b: Operand, *, alpha: int = 1) -> None:
    """Add `alpha` times the product of two operands to `total` in place."""
    if isinstance(a, SplitMatrix) and isinstance(b, SplitMatrix):
        for x, y in ((a.mid, b.hi), (a.hi, b.mid), (a.hi, b.hi)):
            _add_(total, x, y, alpha)
    else:
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        total.baddbmm_(a, b, alpha=alpha)


def _add_(total: Tensor, a: Tensor, b: Tensor, alpha: int) -> Tensor:
    """Add `alpha` times the product of bf16 matrices to fp32 ones."""
    out: Tensor = torch.baddbmm(total, a, b, out_dtype=torch.float32, alpha=alpha, out=total)
    return out
