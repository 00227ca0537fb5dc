"""SOAP-Muon: the momentum, divided in its eigenbases by the root of its second moment, then
orthogonalized.

The rule joins SOAP (arXiv:2409.11321) and Muon (Jordan et al., 2024). Letters: B momentum, N the
Nesterov combination of B and the gradient, K_i factors and Q_i bases of N, V second moment in the
bases. B is kept in the parameter's coordinates, so a refresh rotates V alone. Before the first
bases the rule is Muon.

Like Muon's, its update does not depend on the scale of the gradients, so eps is relative to the
root mean square of Q_L^T N Q_R. Squares that vanish in V count as the smallest number of its dtype;
otherwise their elements would be divided by eps alone.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.linalg.kronecker import precondition, update_kronecker_factors, without_rounding
from lather.optim.options import Count, Decay, NonNegative
from lather.optim.rule import Entry, Matrix, State, rms
from lather.optim.rules.bases import BasisRule
from lather.optim.rules.muon import MuonRule


@dataclass(frozen=True)
class SOAPMuonRule(MuonRule, BasisRule):
    """Muon whose momentum is first preconditioned in eigenbases, with its norm kept."""

    _: KW_ONLY
    shampoo_beta: Decay = 0.95
    """Decay rate of the Kronecker factors."""
    eps: NonNegative = 1e-8
    """Number added to the root of the second moment, relative to the root mean square of the
    momentum."""
    sides: Literal["both", "smaller", "larger", "auto"] = "smaller"
    """Sides of a matrix that have a Kronecker factor and a basis. With smaller, the whole state of
    a 768 x 2048 matrix has 2.56 times as many elements as its weights."""
    statistics_of: Literal["gradient", "momentum"] = "momentum"
    """Tensor whose products with itself the factors average: the gradient, or the momentum N."""
    muon_warmup_steps: Count = 1
    """Steps of plain Muon, the last of which ends with the first bases."""

    name: ClassVar[str] = "soap_muon"
    moment_decays: ClassVar[tuple[str, ...]] = (*MuonRule.moment_decays, "beta2")

    @property
    def turns_momentum(self) -> bool:
        return False

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        bases = BasisRule.state(self, matrix)
        return (
            MuonRule.state(self, matrix)
            | ({"exp_avg_sq": Entry(matrix.shape, "moment", nonnegative=True)} if bases else {})
            | bases
        )

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g = self.decayed(g, s)
        n = x = self.numerator(g, s, t)
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        update_kronecker_factors(
            s.by_dim("factor"), n if self.statistics_of == "momentum" else g, beta, s.active
        )
        if t > self.muon_warmup_steps and (bases := s.by_dim("basis")):
            x = precondition(n, bases, "in")
            limits = torch.finfo(x.dtype)
            eps = (self.eps * rms(x)).clamp_min(math.sqrt(limits.tiny * limits.eps))
            betas = (0.0, self.beta2)  # x is a momentum already
            y = adam_in_basis(x, x, s["exp_avg_sq"], t, betas, eps)
            x = precondition(y, without_rounding(bases, x), "out")
        return self.finished(x, s)

    @property
    def takes_factor(self) -> bool:
        is_read_once = self._is_one_momentum and self.statistics_of == "momentum"
        return is_read_once and not self.couples_decay and self._has_methods_of(SOAPMuonRule)

    @property
    def first_refresh(self) -> int:
        return self.muon_warmup_steps
