"""`unit_norm`: matrices divided by their Frobenius norms, whatever their scale, and rounded: the
first step of Newton-Schulz.

Squares of numbers below 1e-23 vanish in fp32, and those of numbers above 1.8e19 overflow, so that
each matrix is divided by its largest element before it is squared. The norm has to be known before
anything is divided by it: two passes, of which a kernel each reads x (4 bytes per fp32 element) and
the second writes the result (2 bytes in bf16). torch's operations make four passes and move 22
bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.unit_norm import reference
from lather.shapes import Float


def unit_norm(x: Float[Tensor, "b *dims"], dtype: torch.dtype) -> Float[Tensor, "b *dims"]:
    """Return x / |x| in `dtype` for each matrix of x (B, ...); a matrix of zeros stays zero, and
    all elements of a matrix with one that is not finite become NaN."""
    has_kernel = x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0
    return fastest(reference.unit_norm, x, in_reference=not has_kernel)(x, dtype)
