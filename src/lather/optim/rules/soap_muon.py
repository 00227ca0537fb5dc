"""SOAP-Muon: the momentum, divided in an eigenbasis by the root of its second moment, then orthogonalised.

B momentum, N its Nesterov numerator, K_i factors and Q_i bases of N, V second moment in the bases. B stays in parameter space, so a refresh
turns V alone. Until the first bases it is Muon. Joins SOAP (arXiv:2409.11321) and Muon (Jordan et al., 2024).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.engine.optimizer import MatrixOptimizer, constructor
from lather.optim.linalg.kronecker import precondition, update_kronecker_factors
from lather.optim.linalg.newton_schulz import with_norm_of
from lather.optim.options import Count, Decay, NonNegative
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.bases import BasisRule
from lather.optim.rules.muon import MuonRule


@dataclass(frozen=True)
class SOAPMuonRule(MuonRule, BasisRule):
    """Momentum, preconditioned in an eigenbasis with its norm kept, then orthogonalised."""

    _: KW_ONLY
    shampoo_beta: Decay = 0.95
    """Decay rate of the Kronecker factors."""
    eps: NonNegative = 1e-8
    """Added to the root of the second moment."""
    sides: Literal["both", "smaller", "larger", "auto"] = "smaller"
    """Which sides of a matrix have a factor and a basis; smaller: 2.75 times the weights of a 768 x 2048 matrix are kept, in all."""
    statistics_of: Literal["gradient", "momentum"] = "momentum"
    """Source of the factors: the gradient, or the momentum N."""
    muon_warmup_steps: Count = 1
    """Plain Muon for this many steps, then the first bases."""

    name: ClassVar[str] = "soap_muon"
    moment_decays: ClassVar[tuple[str, ...]] = ("momentum", "beta2")

    @property
    def turns_momentum(self) -> bool:
        return False

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        bases = BasisRule.state(self, matrix)
        return MuonRule.state(self, matrix) | ({"exp_avg_sq": Entry(matrix.shape, "moment")} if bases else {}) | bases

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g = self.decayed(g, s)
        n = x = self.numerator(g, s)
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        update_kronecker_factors(s.by_dim("factor"), n if self.statistics_of == "momentum" else g, beta, s.active)
        if t > self.muon_warmup_steps and (bases := s.by_dim("basis")):
            x = precondition(n, bases, "in")
            y = adam_in_basis(x, x, s["exp_avg_sq"], t, (0.0, self.beta2), self.eps)  # x is an average of its own
            x = precondition(with_norm_of(x, y), bases, "out")
        return self.finished(x, s)

    @property
    def first_refresh(self) -> int:
        return self.muon_warmup_steps


class SOAPMuon(MatrixOptimizer):
    """Muon whose momentum is preconditioned in an eigenbasis first; vectors take AdamW's step at the same rate."""

    rule = SOAPMuonRule

    @constructor(SOAPMuonRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)
