"""Shampoo: the momentum, multiplied on each side by an inverse root of the factor of that side.

Source: Gupta, Koren, Singer, arXiv:1802.09568; grafting: Agarwal et al., arXiv:2002.11803, as in
Distributed Shampoo (Shi et al., arXiv:2309.06497). Letters: M momentum, which stays in the
parameter's coordinates, K_i factors (averages of G G^T and G^T G), U update. The roots are computed
from eigenvectors. Damping is relative to the largest eigenvalue.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.linalg.eigenbasis import get_eigenbasis_eigh, is_zero, rayleigh_quotients
from lather.optim.linalg.kronecker import precondition, update_kronecker_factors
from lather.optim.linalg.scale import column, factors_between, norms
from lather.optim.options import Betas, Interval, NonNegative, Positive, Rate, Size
from lather.optim.rule import Entry, Matrix, RefreshingRule, Rule, State
from lather.optim.rules.adamw import AdamWRule, adam_moments
from lather.optim.rules.bases import SidedRule


@dataclass(frozen=True)
class ShampooRule(SidedRule, RefreshingRule):
    """Momentum times inverse roots of Kronecker factors, with Adam's size (arXiv:1802.09568)."""

    lr: Rate = 4e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of the momentum, and of the factors and Adam's second moment."""
    eps: NonNegative = 1e-8
    """Number added to the root of Adam's second moment."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`; coupled decay ("l2") does not enter the
    factors."""
    _: KW_ONLY
    precondition_frequency: Interval = 10
    """Steps between computations of the roots. In Python it may also be a function of the step
    (`lather.optim.schedules`)."""
    exponent: Size = None
    """Power p of the roots K^-p. None: 1 / (2 k) for a matrix with k factors, as published."""
    damping: Positive = 1e-4
    """Number added to the eigenvalues of a factor, relative to the largest."""
    grafting: Literal["adam", "momentum", "none"] = "adam"
    """Norm of the update of a matrix. adam: that of Adam's update; momentum: that of the average
    of gradients, as in SGD, without a second moment in the state; none: unchanged."""

    name: ClassVar[str] = "shampoo"
    refreshes_first: ClassVar[bool] = True

    def on(self, matrix: Matrix) -> Rule:
        return self if self.dims(matrix) else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule, nesterov=False)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = adam_moments(matrix)
        if self.grafting != "adam":
            del entries["exp_avg_sq"]
        for dim in self.dims(matrix):
            n = matrix.shape[dim]
            entries[f"factor_{dim}"] = Entry((n, n), "factor")
            entries[f"root_{dim}"] = Entry((n, n), "basis", None)
        return entries

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        beta = 1 - (1 - self.betas[1]) / (1 - self.betas[1] ** t)  # an average without bias
        update_kronecker_factors(s.by_dim("factor"), g, beta, s.active)

    def refresh(self, s: State, dim: int, method: str, first: bool) -> Tensor:
        k, root = s[f"factor_{dim}"], s[f"root_{dim}"]
        q, failed = get_eigenbasis_eigh(k)
        w = rayleigh_quotients(k, q)
        w = (w + self.damping * w.amax(-1, keepdim=True)).clamp_min(torch.finfo(w.dtype).tiny)
        p = self.exponent or 1 / (2 * len(s.by_dim("factor")))
        # not pow, whose bits on a CPU depend on the size of the batch
        new = q * (-p * w.log()).exp().unsqueeze(-2) @ q.mT
        root.copy_(root.where((failed | is_zero(k))[:, None, None], new))
        return failed

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g, m = self.decayed(g, s), s["exp_avg"]
        if self.grafting == "adam":
            target = norms(adam_in_basis(g, m, s["exp_avg_sq"], t, self.betas, self.eps))
        else:
            m.lerp_(g, 1 - self.betas[0])
        m = m / (1 - self.betas[0] ** t)
        u = precondition(m, s.by_dim("root"), "in")
        if self.grafting == "none":
            return u
        if self.grafting == "momentum":
            target = norms(m)
        return u * column(factors_between(target, norms(u)), u)
