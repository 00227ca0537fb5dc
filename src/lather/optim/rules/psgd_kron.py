"""PSGD-Kron: the momentum, whitened by Kronecker factors that gradient descent fits to it.

Source: Li, arXiv:1512.04202 and arXiv:2211.04422; the fit is that of Q by P = Q^2, without inverses
(QUAD in the author's psgd_torch). Letters: M momentum, Q_i symmetric factors, U = P_L M P_R update.
At the optimum the products of X = U + noise with itself are n_i / (m n) on each side's diagonal,
all elements of U have mean square 1.

The published fit draws noise V for every step and adds damping rms(M) V to M. Its effect on the
products has the exact mean damping^2 rms(M)^2 P_i^2 prod_j tr(P_j^2), which is used here: the rule
draws nothing. The fit runs on M / rms(M), so that it does not depend on the scale of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lather.optim.linalg.kronecker import gram, precondition, unfold
from lather.optim.linalg.scale import column, norms, norms_of_any_scale
from lather.optim.options import Decay, NonNegative, Range, Rate, is_number
from lather.optim.rule import Entry, Matrix, Rule, State, rms
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.bases import SidedRule, clip_rms
from lather.shapes import Float

CURVATURE_DECAY = 0.9
"""Decay rate of the largest eigenvalue by which a step of the fit is divided, as published."""

LARGEST_RMS = 100.0
"""Root mean square of P M from which on the fit scales it down, which hardly changes its step: one
huge gradient would otherwise leave a curvature that stops the fit for hundreds of steps."""


@dataclass(frozen=True)
class PSGDKronRule(SidedRule):
    """Momentum, whitened by Kronecker factors that are fitted to it at every step
    (arXiv:2211.04422)."""

    lr: Rate = 2e-3
    """Learning rate."""
    momentum: Decay = 0.9
    """Decay rate of the momentum."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`."""
    _: KW_ONLY
    fit_lr: Annotated[
        float, Range("a number in (0, 1]", lambda rate: is_number(rate) and 0 < rate <= 1)
    ] = 0.1
    """Learning rate of the factors. With 6, weights became NaN."""
    damping: NonNegative = 1e-2
    """Standard deviation of the noise for which the factors are fitted, relative to the root mean
    square of the momentum."""
    max_update_rms: NonNegative = 1.1
    """Scale the update of a matrix down to this root mean square (rms) where it is larger; 0: no
    limit."""

    name: ClassVar[str] = "psgd_kron"

    def on(self, matrix: Matrix) -> Rule:
        return self if self.dims(matrix) else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = {"momentum_buffer": Entry(matrix.shape, "moment")}
        for dim in self.dims(matrix):
            entries[f"factor_{dim}"] = Entry((matrix.shape[dim],) * 2, "factor")
            entries[f"curvature_{dim}"] = Entry(())
        return entries

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        weight = (1 - self.momentum) / (1 - self.momentum**t)  # an average without bias
        m = s["momentum_buffer"].lerp_(self.decayed(g, s), weight)
        rows = slice(None) if s.active is None else s.active
        self.fit(m[rows], s, rows)
        u = precondition(m, {dim: q @ q for dim, q in s.by_dim("factor").items()}, "in")
        return clip_rms(u, self.max_update_rms)

    def fit(self, m: Tensor, s: State, rows: slice | Tensor) -> None:
        """Fit the factors of these rows of the state to their momentum m, in place. A matrix that
        never had a gradient has no factors yet; they begin with P M of mean square 1."""
        factors, curvatures = s.by_dim("factor"), s.by_dim("curvature")
        size = norms_of_any_scale(m) / math.sqrt(m[0].numel() if len(m) else 1)
        has_any, size = size > 0, size.clamp_min(torch.finfo(size.dtype).tiny)
        root = (size.log() / (2 * len(factors))).exp()  # of M / rms(M), the factors are Q root
        qs = dict[int, Tensor]()
        for dim, q in factors.items():
            eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
            has_begun = column(q[rows, 0, 0] != 0, q)
            qs[dim] = (q[rows] * column(root, q)).where(has_begun, eye)
        old = {dim: x[rows] for dim, x in curvatures.items()}
        fitted = whitening_step(m / column(size, m), qs, old, self.fit_lr, self.damping)
        for dim, (q, curvature) in fitted.items():
            new = (q / column(root, q)).where(column(has_any, q), factors[dim][rows])
            factors[dim][rows] = new
            curvatures[dim][rows] = curvature.where(has_any, old[dim])


def whitening_step(
    m: Float[Tensor, "b *dims"],
    qs: Mapping[int, Float[Tensor, "b _ _"]],
    curvatures: Mapping[int, Float[Tensor, " b"]],
    lr: float,
    damping: float,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return for each dim Q = (1 - c (A - 1)) Q (1 - c (A - 1)) and the curvature that limits c.

    A = n_i / numel E[X X^T] for X = P (M + damping V), unfolded on dim i, where V is noise; at the
    optimum it is the identity. m has root mean square 1. c is lr / 2 over the curvature, a largest
    eigenvalue of A + 1 that decays slowly.
    """
    ps = {dim: q @ q for dim, q in qs.items()}
    traces = {dim: p.square().sum(-1).sum(-1) for dim, p in ps.items()}
    x, fitted = precondition(m, ps, "in"), dict[int, tuple[Tensor, Tensor]]()
    excess = (rms(x) / LARGEST_RMS).clamp_min(1.0)
    x = x / column(excess, x)
    for dim, q in qs.items():
        noise = (damping / excess).square()
        for other, length in enumerate(m.shape[1:]):
            noise = noise * (1 if other == dim else traces.get(other, length))
        a = gram(unfold(x, dim)) + column(noise, q) * gram(ps[dim])
        a = a * (q.shape[-1] / math.prod(m.shape[1:]))
        now = largest_eigenvalue(a) + 1
        curvature = now.maximum(now.lerp(curvatures[dim], CURVATURE_DECAY))
        c = column(lr / (2 * curvature), q)
        half = q - c * (a @ q - q)
        new = half - c * (half @ a - half)
        fitted[dim] = (new + new.mT) / 2, curvature
    return fitted


def largest_eigenvalue(a: Float[Tensor, "b n n"]) -> Float[Tensor, " b"]:
    """Return an estimate from below of the largest eigenvalue of symmetric, positive semidefinite
    a: two steps of power iteration from the row with the largest diagonal element."""
    x = a[torch.arange(len(a), device=a.device), a.diagonal(dim1=-2, dim2=-1).argmax(-1)]
    for _ in range(2):
        x = x / column(norms(x).clamp_min(torch.finfo(x.dtype).tiny), x)
        x = (a * x.unsqueeze(-2)).sum(-1)
    return norms(x)
