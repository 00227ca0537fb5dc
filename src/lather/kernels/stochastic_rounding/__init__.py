"""`round_to_bf16`: stochastic rounding of fp32 values to bf16, so that sums of many small updates
are right on average.

A value between two neighbors in bf16 is rounded to the upper one with a probability that is its
distance from the lower one, in units of their distance. The noise is a hash of the value's own bits
and of the step, so there is no generator and no state: every mesh, batch and device, and a run that
is resumed, gives the same bits. A value that bf16 has stays what it is.

Source: Gupta et al., arXiv:1502.02551; the hash is most of Wellons' lowbias32 (2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.stochastic_rounding import reference
from lather.shapes import Float


@torch.no_grad()
def round_to_bf16(
    x: Float[Tensor, "*dims"], step: int, *, out: Tensor | None = None
) -> Float[Tensor, "*dims"]:
    """Return `x` (fp32, any shape and strides) in bf16, rounded up or down with the probabilities
    that keep its expectation over steps.

    Infinities and NaN stay; values above bf16's largest become that or infinity, as all others
    become one of their two neighbors. Raises TypeError for other dtypes than fp32.

    Args:
        step: any integer; equal values are rounded alike in one step, and independently in another.
        out: bf16 tensor of the same shape that takes the result.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x is {x.dtype}: has to be torch.float32 (convert it first)")
    if out is None:
        out = torch.empty_like(x, dtype=torch.bfloat16)
    strided = not (x.is_contiguous() and out.is_contiguous())
    fastest(reference.round_to_bf16, x, out, in_reference=strided)(x, step, out)
    return out
