"""The output of each token as the weighted sum of its experts' rows.

    out[t] = sum over k of weights[t, k] * rows[row_TK[t, k]]        a row of -1 contributes nothing

Letters: T tokens, K slots (experts per token), G rows grouped by expert, D columns.

Sums are computed in fp32 (fp64 for fp64), in the order of the slots, and rounded once to the dtype
of the rows; no (T, K, D) tensor is created. The rows are those of a `route.Route`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import run
from lather.kernels.combine import reference
from lather.shapes import Float, Int


@torch.no_grad()
def combine_forward(
    rows: Float[Tensor, "g d"],
    row_TK: Int[Tensor, "t k"],
    weights_TK: Float[Tensor, "t k"] | None = None,
) -> Float[Tensor, "t d"]:
    """Return the weighted sum of each token's rows, in their dtype, without autograd or checks.
    Without weights it is the plain sum, the adjoint of copying tokens to rows."""
    return run(reference.combine_forward, rows, row_TK, weights_TK)
