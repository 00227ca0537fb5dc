"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3, with the amortised refresh of
its algorithm 4. Statistics of earlier steps precondition this one: project in, Adam, project out, then update the factors, then refresh.

Letters: W parameter, G gradient, U update, L and R (here K_i) the Kronecker factors, Q_i their eigenbases, M = exp_avg, V = exp_avg_sq,
both kept in eigenbasis coordinates once a basis exists. Every tensor carries a leading batch dim B (matrices of equal shape).

Trade-off: one factor and one basis per dim are kept (2 (m^2 + n^2) elements for a matrix) so that a step costs two products per dim
and the eigenvectors may go stale between refreshes.
"""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.engine.optimizer import MatrixOptimizer, constructor
from lather.optim.linalg.kronecker import bias_corrected_beta, precondition, update_kronecker_factors
from lather.optim.linalg.newton_schulz import orthogonalize, update_scale
from lather.optim.options import Betas, Interval, NonNegative, Range, Rate, is_number
from lather.optim.rule import Entry, Matrix, Rule, State, column, rms
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.bases import BasisRule, Warmup, clip_rms

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SOAPRule(BasisRule):
    """Adam in the slowly turning eigenbasis of Shampoo's preconditioner (arXiv:2409.11321)."""

    lr: Rate = 3e-3
    """Learning rate."""
    betas: Betas = (0.95, 0.95)
    """Decay rates of Adam's two moments."""
    shampoo_beta: Annotated[float, Range("a number below 1 (negative: betas[1])", lambda beta: is_number(beta, -float("inf"), 1.0))] = -1
    """Decay rate of the Kronecker factors; negative: `betas[1]`."""
    eps: NonNegative = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`; coupled decay ("l2") enters the factors, too."""
    _: KW_ONLY
    use_decoupled_weight_decay: bool = True
    """False: the same as `weight_decay_method="l2"`."""
    use_nesterov: bool = False
    """Adam's momentum one step ahead."""
    adam_warmup_steps: Warmup = 1
    """Plain Adam for this many steps, then the first bases; made at least 1, and less than `precondition_warmup_steps` if that is set."""
    second_moment: Literal["permute", "rotate"] = "permute"
    """How V follows turning bases: re-ordered with the columns, as published, or turned with them, which keeps the first steps small."""
    momentum_in: Literal["basis", "parameter"] = "basis"
    """Coordinates of M. basis: it turns with the bases at a refresh. parameter: it is projected in at every step, which takes less time
    where bases are refreshed at every step, and is called `momentum_buffer`. The same rule to rounding."""
    statistics_of: Literal["gradient", "momentum"] = "gradient"
    """Source of the factors: the gradient, or Adam's momentum."""
    orthogonalize: bool = False
    """Orthogonalise the update of a matrix by five steps of Newton-Schulz, at 0.2 sqrt(max(m, n)) of scale, like Muon's."""
    trace_normalization: bool = False
    """Multiply the update by the root of the first factor's trace."""
    normalize_preconditioned_grads: bool = False
    """Scale the update to rms 1."""
    correct_bias: bool = True
    """Adam's bias correction, and the same for the factors."""
    use_eigh: bool = False
    """The same as `refresh_method="eigh"`."""
    max_update_rms: NonNegative = 0.0
    """Clip each matrix's update to this rms; 0: no clipping."""

    name: ClassVar[str] = "soap"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_eigh and self.refresh_method not in ("auto", "eigh"):
            raise ValueError(f"use_eigh=True contradicts refresh_method={self.refresh_method!r}: give refresh_method alone")
        if not self.use_decoupled_weight_decay and self.weight_decay_method in ("independent", "palm"):
            raise ValueError(
                f"use_decoupled_weight_decay=False contradicts weight_decay_method={self.weight_decay_method!r}: give the latter"
            )
        adam = max(self.adam_warmup_steps, 1)
        if adam >= self.precondition_warmup_steps > 0:
            adam = max(1, self.precondition_warmup_steps - 1)
        if adam != self.adam_warmup_steps:
            reason = "at least 1, and less than precondition_warmup_steps (%d) if that is set"
            logger.info(f"adam_warmup_steps %d becomes %d: {reason}", self.adam_warmup_steps, adam, self.precondition_warmup_steps)
            object.__setattr__(self, "adam_warmup_steps", adam)

    @property
    def couples_decay(self) -> bool:
        is_coupled = not self.use_decoupled_weight_decay or self.weight_decay_method == "l2"
        return bool(self.weight_decay) and is_coupled and not self.keep_norm

    def decay(self, lr: float) -> float:
        return 0.0 if self.couples_decay else super().decay(lr)

    def on(self, matrix: Matrix) -> Rule:
        looks_at_whole = self.max_update_rms > 0 or self.normalize_preconditioned_grads or (self.orthogonalize and matrix.is_matrix)
        return self if self.dims(matrix) or looks_at_whole else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        method: Literal["l2", "decoupled"] = "l2" if self.couples_decay else self.weight_decay_method  # type: ignore[assignment]
        return self.turned_into(AdamWRule, nesterov=self.use_nesterov, weight_decay_method=method)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {key: Entry(matrix.shape, "moment") for key in (self._momentum, "exp_avg_sq")} | super().state(matrix)

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        factors = s.by_dim("factor")
        if t == 1 and self.statistics_of == "gradient":
            update_kronecker_factors(factors, g, beta=0.0)
        if s.weights is not None:
            g = self.decayed(g, s)

        bases = s.by_dim("basis") if t > self.adam_warmup_steps else {}
        x, m, v, nesterov = precondition(g, bases, "in"), s[self._momentum], s["exp_avg_sq"], self.use_nesterov
        if bases and not self.turns_momentum:
            m = precondition(m, bases, "in")
            s[self._momentum].lerp_(g, 1 - self.betas[0])
        u = adam_in_basis(x, m, v, t, self.betas, self.eps, correct_bias=self.correct_bias, nesterov=nesterov)
        u = self._normalized(precondition(u, bases, "out"), factors)

        x = g
        if self.statistics_of == "momentum":
            x = precondition(m, bases, "out") if self.turns_momentum else s[self._momentum]
        beta = self.shampoo_beta if self.shampoo_beta >= 0 else self.betas[1]
        if t == 1 and self.statistics_of == "momentum":
            beta = 0.0
        elif self.correct_bias:
            beta = bias_corrected_beta(beta, t)
        update_kronecker_factors(factors, x, beta, s.active)
        return u

    def _normalized(self, u: Tensor, factors: dict[int, Tensor]) -> Tensor:
        """The optional normalisations of the update, each per matrix."""
        if self.orthogonalize and u.dim() == 3:
            u = orthogonalize(u) * update_scale(u.shape[1:], "match_rms_adamw")
        if self.trace_normalization and factors:
            u = u * column(factors[min(factors)].diagonal(dim1=-2, dim2=-1).sum(-1).sqrt(), u)
        if self.normalize_preconditioned_grads:
            u = u / (1e-30 + column(rms(u), u))
        return clip_rms(u, self.max_update_rms) if self.max_update_rms else u

    @property
    def turns_momentum(self) -> bool:
        return self.momentum_in == "basis"

    @property
    def _momentum(self) -> str:
        """The name of M in the state: another one in other coordinates, so that neither is taken for the other."""
        return "exp_avg" if self.turns_momentum else "momentum_buffer"

    @property
    def first_refresh(self) -> int:
        return self.adam_warmup_steps

    def methods(self, first: bool) -> tuple[str, ...]:
        return ("eigh",) if self.use_eigh else super().methods(first)


@dataclass(frozen=True)
class EmbeddingSOAPRule(SOAPRule):
    """SOAP with the defaults that suit embeddings and heads: a basis for the smaller side, the hidden one, renewed at every step.

    A factor over the vocabulary would be far too large; one over the hidden side costs less than a thousandth of a large model's step.
    """

    betas: Betas = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    _: KW_ONLY
    precondition_frequency: Interval = 1
    """Steps between refreshes of the basis; in Python also a callable of the step (`lather.optim.schedules`)."""
    sides: Literal["both", "smaller", "larger", "auto"] = "smaller"
    """Which sides of a matrix have a factor and a basis."""
    second_moment: Literal["permute", "rotate"] = "rotate"
    """How V follows a turning basis: re-ordered with the columns, or turned with them."""

    name: ClassVar[str] = "embedding_soap"


class SOAP(MatrixOptimizer):
    """Adam in the slowly turning eigenbasis of Shampoo's preconditioner (arXiv:2409.11321)."""

    rule = SOAPRule

    @constructor(SOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class EmbeddingSOAP(MatrixOptimizer):
    """SOAP with the defaults that suit embeddings and heads: a basis for the smaller side, the hidden one, renewed at every step."""

    rule = EmbeddingSOAPRule

    @constructor(EmbeddingSOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)
