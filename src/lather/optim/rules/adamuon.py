"""AdaMuon: Muon on the signs of the momentum, its update divided by the root of its own second
moment, element by element.

Source: Si et al., arXiv:2507.11005. Letters: N the momentum as in Muon, U update, V its second
moment. V needs no correction of its bias, because the last operation sets the norm of U; it needs
no eps either, because no element exceeds sqrt(1 / (1 - beta2)) times the root of its V.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lather.optim.linalg.newton_schulz import update_scale
from lather.optim.linalg.scale import column, factors_between, norms
from lather.optim.options import Rate
from lather.optim.rule import Entry, Matrix, State
from lather.optim.rules.muon import MuonRule


@dataclass(frozen=True)
class AdaMuonRule(MuonRule):
    """Muon on the signs of the momentum, divided by the root of the second moment of the
    orthogonalized update (arXiv:2507.11005)."""

    lr: Rate = 2e-2
    """Learning rate."""
    _: KW_ONLY
    signs: bool = True
    """Orthogonalize the signs of the momentum, as published; off: the momentum itself."""

    name: ClassVar[str] = "adamuon"
    moment_decays: ClassVar[tuple[str, ...]] = (*MuonRule.moment_decays, "beta2")

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        second = Entry(matrix.shape, "moment", nonnegative=True)
        return super().state(matrix) | {"exp_avg_sq": second}

    def finished(self, x: Tensor, s: State) -> Tensor:
        """Return U for N = x, with the norm that `scale` gives to an orthogonal matrix."""
        u = super().finished(x.sign() if self.signs else x, s).to(x.dtype)
        v = s["exp_avg_sq"].mul_(self.beta2).addcmul_(u, u, value=1 - self.beta2)
        u = u / v.sqrt().clamp_min(math.sqrt(torch.finfo(v.dtype).tiny))
        size = norms(u)
        target = math.sqrt(min(u.shape[1:])) * update_scale(u.shape[1:], self.scale)
        return u * column(factors_between(torch.full_like(size, target), size), u)
