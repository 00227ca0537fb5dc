"""`pack_triangle` and `unpack_triangle`: symmetric matrices (n, n) as n (n + 1) / 2 numbers.

The numbers are those of rectangular full packed format (Gustavson et al., LAPACK Working Note 199):
the lower triangle of the first h = (n + 1) // 2 columns in a rectangle, whose empty corner takes
the triangle of the other columns. All copies are then of blocks, and there is no loop over rows.

    n = 5, h = 3    00 33 43        n = 4, h = 2    22 32
                    10 11 44                        00 33
                    20 21 22                        10 11
                    30 31 32                        20 21
                    40 41 42                        30 31
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.triangle import reference
from lather.shapes import Float


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
