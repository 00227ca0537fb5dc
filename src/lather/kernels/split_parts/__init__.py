"""`split_parts`: an fp32 matrix as the sum of two in bf16,

    hi = bf16(x)        mid = bf16(x - hi)

On a GPU one kernel reads x once and writes both parts, 8 bytes per element; torch's two operations
move 14. Either of rows and columns may be contiguous, in x as well as in the parts.
"""

from __future__ import annotations

from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.split_parts import reference
from lather.shapes import Float


def split_parts(
    x: Float[Tensor, "b m n"], hi: Float[Tensor, "b m n"], mid: Float[Tensor, "b m n"]
) -> None:
    """Write the parts of `x` (fp32) into `hi` and `mid` (bf16), which may be views."""
    has_kernel = x.dim() == 3 and hi.stride() == mid.stride()
    fastest(reference.split_parts, x, hi, mid, in_reference=not has_kernel)(x, hi, mid)
