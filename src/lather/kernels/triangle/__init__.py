"""`pack_triangle` and `unpack_triangle`: symmetric matrices (n, n) as n (n + 1) / 2 numbers.

The numbers are those of rectangular full packed format (Gustavson et al., LAPACK Working Note 199):
the lower triangle of the first h = (n + 1) // 2 columns in a rectangle, whose empty corner takes
the triangle of the other columns. All copies are then of blocks, and there is no loop over rows.

    n = 5, h = 3    00 33 43        n = 4, h = 2    22 32
                    10 11 44                        00 33
                    20 21 22                        10 11
                    30 31 32                        20 21
                    40 41 42                        30 31

`quantize_triangle` and `dequantize_triangle` do the same for Kronecker factors, in 16 bits: an
element is a multiple of the root of the product of its two diagonal elements, which bounds it in a
positive semidefinite matrix; these stay fp32. The error is thus the same part of every element's
bound, however much the rows differ in size, where bf16, of as many bytes, hides small eigenvalues
behind the rounding of large elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.triangle import reference
from lather.shapes import Float, Int


def triangle_numel(n: int) -> int:
    """Return the number of elements of a packed matrix (n, n)."""
    return n * (n + 1) // 2


@torch.no_grad()
def pack_triangle(
    x: Float[Tensor, "*b n n"], *, out: Tensor | None = None
) -> Float[Tensor, "*b packed"]:
    """Return the lower triangles of `x`, packed, in its dtype, or in a contiguous `out` and its
    dtype. The upper triangles are taken to be the same; parts of them are read in place of the
    lower ones."""
    if out is None:
        out = x.new_empty(*x.shape[:-2], triangle_numel(x.shape[-1]))
    fastest(reference.pack_triangle, x, out, in_reference=not x.is_contiguous())(x, out)
    return out


@torch.no_grad()
def unpack_triangle(
    packed: Float[Tensor, "*b packed"], n: int, *, out: Tensor | None = None
) -> Float[Tensor, "*b n n"]:
    """Return the symmetric matrices (n, n) that were packed, in their dtype, or in a contiguous
    `out` and its dtype. Raises ValueError unless `packed` has n (n + 1) / 2 elements each."""
    if packed.shape[-1] != triangle_numel(n):
        raise ValueError(
            f"packed has {packed.shape[-1]} elements, n is {n}: has to have n (n + 1) / 2 = "
            f"{triangle_numel(n)}"
        )
    if out is None:
        out = packed.new_empty(*packed.shape[:-1], n, n)
    fastest(reference.unpack_triangle, packed, out, in_reference=not packed.is_contiguous())(
        packed, out
    )
    return out


@torch.no_grad()
def quantize_triangle(
    x: Float[Tensor, "*b n n"],
    codes: Int[Tensor, "*b packed"],
    diagonal: Float[Tensor, "*b n"],
    step: int,
) -> None:
    """Encode positive semidefinite matrices (fp32) in contiguous `codes` (int16, packed) and
    `diagonal` (fp32). They are rounded up or down with probabilities that keep their expectation
    over steps to 1/32 of a code, by a hash (`lather.kernels.stochastic_rounding`).

    Elements beyond their bound become the bound; those of a row whose diagonal element is not
    positive become 0. Raises TypeError for another dtype than fp32.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x is {x.dtype}: has to be torch.float32 (convert it first)")
    operation = fastest(reference.quantize_triangle, x, codes, in_reference=not x.is_contiguous())
    operation(x, codes, diagonal, step)


@torch.no_grad()
def dequantize_triangle(
    codes: Int[Tensor, "*b packed"], diagonal: Float[Tensor, "*b n"]
) -> Float[Tensor, "*b n n"]:
    """Return the matrices that `quantize_triangle` encoded, in fp32. Encoded again, they have the
    same codes, in any step, unless they have elements that fp32 has as denormal numbers."""
    out = diagonal.new_empty(*diagonal.shape, diagonal.shape[-1])
    fastest(reference.dequantize_triangle, codes, out)(codes, diagonal, out)
    return out
