"""`nesterov_`: Nesterov's momentum, as Muon uses it.

    B <- mu B + (1 - mu) G        N = mu B + (1 - mu) G

On a GPU one kernel reads G and B and writes B and N, 16 bytes per fp32 element; torch's two
operations move 24. G may be multiplied by a factor, which clips it, as it is read.

`unit_nesterov_` divides N by its norm, for Newton-Schulz (`lather.kernels.unit_norm`), and does not
write it: 22 bytes with a result in bf16, of which both operations one after the other move 26.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lather.kernels.backend import fastest
from lather.kernels.momentum import reference
from lather.shapes import Float


def nesterov_(
    b: Float[Tensor, "*dims"], g: Float[Tensor, "*dims"], mu: float, factor: float = 1.0
) -> Tensor:
    """Update the momentum `b` with `factor` times the gradient `g` in place, and return N, in the
    shape and dtype of `g`, which is not changed. `mu` is in [0, 1)."""
    has_kernel = (
        b.dtype == g.dtype and b.element_size() <= 4 and b.is_contiguous() and g.is_contiguous()
    )
    n: Tensor = fastest(reference.nesterov_, b, g, in_reference=not has_kernel)(b, g, mu, factor)
    increment_version(b)  # a kernel of Triton does not tell torch
    return n


def unit_nesterov_(
    b: Float[Tensor, "b *dims"],
    g: Float[Tensor, "b *dims"],
    mu: float,
    dtype: torch.dtype,
    factor: float = 1.0,
) -> Tensor:
    """Do the same as `nesterov_`, and return N / |N| in `dtype` for each matrix of N (B, ...), as
    `unit_norm` does."""
    has_kernel = (
        (b.dtype == g.dtype == torch.float32)
        and b.is_contiguous()
        and g.is_contiguous()
        and g.numel() > 0
    )
    operation = fastest(reference.unit_nesterov_, b, g, in_reference=not has_kernel)
    n: Tensor = operation(b, g, mu, dtype, factor)
    increment_version(b)
    return n
