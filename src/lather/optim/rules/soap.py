"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321,
algorithm 3, with the amortized refresh of its algorithm 4. The bases of earlier steps precondition
the gradient: project into the bases, Adam, project out; then update the factors and refresh the
bases.

Letters: W parameter, G gradient, U update, L and R (here K_i) the Kronecker factors, Q_i their
eigenbases, M = exp_avg, V = exp_avg_sq, both kept in eigenbasis coordinates once a basis exists.
Every tensor carries a leading batch dim B (matrices of equal shape).

Trade-off: the state holds one factor and one basis per dim (2 (m^2 + n^2) elements for a matrix),
so that a step costs two products per dim; between refreshes the eigenvectors are out of date.
"""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.linalg.kronecker import (
    bias_corrected_beta,
    precondition,
    update_kronecker_factors,
    without_rounding,
)
from lather.optim.linalg.newton_schulz import orthogonalize, update_scale
from lather.optim.linalg.scale import column
from lather.optim.options import Betas, Interval, NonNegative, Range, Rate, is_number
from lather.optim.rule import Entry, Matrix, Rule, State, rms
from lather.optim.rules.adamw import AdamWRule, adam_moments
from lather.optim.rules.bases import BasisRule, Warmup, clip_rms

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SOAPRule(BasisRule):
    """Adam in the slowly turning eigenbasis of Shampoo's preconditioner (arXiv:2409.11321)."""

    lr: Rate = 3e-3
    """Learning rate."""
    betas: Betas = (0.95, 0.95)
    """Decay rates of Adam's first and second moment."""
    shampoo_beta: Annotated[
        float,
        Range(
            "a number below 1 (negative: betas[1])",
            lambda beta: is_number(beta, -float("inf"), 1.0),
        ),
    ] = -1
    """Decay rate of the Kronecker factors; negative: `betas[1]`."""
    eps: NonNegative = 1e-8
    """Number added to the root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`; coupled decay ("l2") enters the factors, too."""
    _: KW_ONLY
    use_nesterov: bool = False
    """Use Nesterov momentum in Adam."""
    adam_warmup_steps: Warmup = 1
    """Steps of plain Adam, the last of which ends with the first bases. A value below 1 counts as
    1; a value that is not less than `precondition_warmup_steps`, if that is set, is lowered."""
    second_moment: Literal["permute", "rotate"] = "permute"
    """Change of the second moment when a basis changes. permute: its entries follow the re-ordered
    columns, as published; rotate: it is rotated into the new basis, which keeps the first steps
    small."""
    momentum_in: Literal["basis", "parameter"] = "basis"
    """Coordinates in which the momentum M is kept. basis: those of the bases; a refresh rotates M.
    parameter: those of the parameter; every step projects M into the bases, which takes less time
    if bases are refreshed at every step, and the state calls M `momentum_buffer`. Results agree up
    to rounding."""
    statistics_of: Literal["gradient", "momentum"] = "gradient"
    """Tensor whose products with itself the factors average: the gradient, or Adam's momentum."""
    orthogonalize: bool = False
    """Orthogonalize the update of a matrix with five steps of Newton-Schulz and multiply it by 0.2
    sqrt(max(m, n)), like Muon."""
    trace_normalization: bool = False
    """Multiply the update by the square root of the trace of the first factor."""
    normalize_preconditioned_grads: bool = False
    """Scale the update of every matrix to root mean square 1."""
    correct_bias: bool = True
    """Correct the bias of Adam's moments and of the factors."""
    max_update_rms: NonNegative = 0.0
    """Scale the update of a matrix down to this root mean square (rms) where it is larger; 0: no
    limit."""

    name: ClassVar[str] = "soap"

    def __post_init__(self) -> None:
        super().__post_init__()
        adam = max(self.adam_warmup_steps, 1)
        if adam >= self.precondition_warmup_steps > 0:
            adam = max(1, self.precondition_warmup_steps - 1)
        if adam != self.adam_warmup_steps:
            reason = "at least 1, and less than precondition_warmup_steps (%d) if that is set"
            logger.info(
                f"adam_warmup_steps %d becomes %d: {reason}",
                self.adam_warmup_steps,
                adam,
                self.precondition_warmup_steps,
            )
            object.__setattr__(self, "adam_warmup_steps", adam)

    def on(self, matrix: Matrix) -> Rule:
        looks_at_whole = (
            self.max_update_rms > 0
            or self.normalize_preconditioned_grads
            or (self.orthogonalize and matrix.is_matrix)
        )
        return self if self.dims(matrix) or looks_at_whole else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule, nesterov=self.use_nesterov)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return adam_moments(matrix, self._momentum) | super().state(matrix)

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        factors = s.by_dim("factor")
        if t == 1 and self.statistics_of == "gradient":
            update_kronecker_factors(factors, g, beta=0.0)
        if s.weights is not None:
            g = self.decayed(g, s)

        bases = s.by_dim("basis") if t > self.adam_warmup_steps else {}
        x, m, v = precondition(g, bases, "in"), s[self._momentum], s["exp_avg_sq"]
        if bases and not self.turns_momentum:
            m = precondition(m, bases, "in")
            s[self._momentum].lerp_(g, 1 - self.betas[0])
        u = adam_in_basis(
            *(x, m, v, t, self.betas, self.eps),
            correct_bias=self.correct_bias,
            nesterov=self.use_nesterov,
        )
        u = precondition(u, without_rounding(bases, m.to(u.dtype)), "out")
        u = self._normalized(u, factors)

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
        """Apply the optional normalizations to the update of each matrix."""
        if self.orthogonalize and u.dim() == 3:
            u = orthogonalize(u, scale=update_scale(u.shape[1:], "match_rms_adamw"))
        if self.trace_normalization and factors:
            u = u * column(factors[min(factors)].diagonal(dim1=-2, dim2=-1).sum(-1).sqrt(), u)
        if self.normalize_preconditioned_grads:
            u = u / column(rms(u).clamp_min(torch.finfo(u.dtype).tiny), u)
        return clip_rms(u, self.max_update_rms) if self.max_update_rms else u

    @property
    def turns_momentum(self) -> bool:
        return self.momentum_in == "basis"

    @property
    def _momentum(self) -> str:
        """The name of M in the state. It depends on the coordinates of M, so that a loaded M is
        never taken to be in other coordinates."""
        return "exp_avg" if self.turns_momentum else "momentum_buffer"

    @property
    def first_refresh(self) -> int:
        return self.adam_warmup_steps


@dataclass(frozen=True)
class EmbeddingSOAPRule(SOAPRule):
    """SOAP with defaults for embeddings and heads: one basis, on the smaller (hidden) side,
    refreshed at every step.

    A factor over the vocabulary would be far too large; a factor over the hidden side costs less
    than a thousandth of a large model's step."""

    betas: Betas = (0.9, 0.95)
    """Decay rates of Adam's first and second moment."""
    _: KW_ONLY
    precondition_frequency: Interval = 1
    """Steps between refreshes of the basis. In Python it may also be a function of the step
    (`lather.optim.schedules`)."""
    sides: Literal["both", "smaller", "larger", "auto"] = "smaller"
    """Sides of a matrix that have a Kronecker factor and a basis."""
    second_moment: Literal["permute", "rotate"] = "rotate"
    """Change of the second moment when a basis changes: its entries follow the re-ordered columns,
    or it is rotated into the new basis."""

    name: ClassVar[str] = "embedding_soap"
