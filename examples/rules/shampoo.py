"""Shampoo: U = L^(-1/4) M R^(-1/4), where M is a momentum in parameter space."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lather.optim import AdamW, Entry, Matrix, RefreshingRule, Rule, State
from lather.optim.functional import get_eigenbasis_eigh, precondition, update_kronecker_factors
from lather.optim.options import Betas, Interval, NonNegative, Positive, Rate


@dataclass(frozen=True)
class ShampooRule(RefreshingRule):
    """Shampoo with momentum and updates of a fixed size (arXiv:1802.09568)."""

    lr: Rate = 3e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of the momentum and of the factors."""
    weight_decay: NonNegative = 0.0
    """Weight decay, wd in `weight_decay_method`."""
    _: KW_ONLY
    precondition_frequency: Interval = 5
    """Steps between refreshes of the roots."""
    damping: Positive = 1e-4
    """Added to the eigenvalues of a factor, relative to the largest."""
    size: Positive = 0.2
    """Root mean square of every update."""

    refreshes_first: ClassVar[bool] = True

    def on(self, matrix: Matrix) -> Rule:
        return self if matrix.is_matrix else self.turned_into(AdamW.rule)

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        return (0, 1)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = {"exp_avg": Entry(matrix.shape, "moment")}
        for dim, n in enumerate(matrix.shape):
            entries[f"factor_{dim}"] = Entry((n, n), "factor")
            entries[f"root_{dim}"] = Entry((n, n), "basis", initial=None)
        return entries

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        update_kronecker_factors(s.by_dim("factor"), g, self.betas[1], s.active)

    def refresh(self, s: State, dim: int, method: str, first: bool) -> Tensor:
        k, root = s[f"factor_{dim}"], s[f"root_{dim}"]
        q, failed = get_eigenbasis_eigh(k)
        w = (q * (k @ q)).sum(-2)
        w = (w + self.damping * w.amax(-1, keepdim=True)).clamp_min(torch.finfo(w.dtype).tiny)
        new = q * w.rsqrt().sqrt().unsqueeze(-2) @ q.mT
        root.copy_(root.where(failed[:, None, None], new))
        return failed

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        m = s["exp_avg"].lerp_(self.decayed(g, s), 1 - self.betas[0])
        u = precondition(m, s.by_dim("root"), "in")
        norm = torch.linalg.matrix_norm(u, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
        return u * (self.size * u[0].numel() ** 0.5 / norm)
