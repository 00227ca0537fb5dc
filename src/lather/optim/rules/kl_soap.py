"""KL-SOAP, REKLS and stacked SOAP: Adam in the eigenbases of factors that are estimated by
minimizing a KL divergence.

Source: Lin et al., "Understanding and Improving Shampoo and SOAP via Kullback-Leibler
Minimization", arXiv:2509.03378. The factor of one dim averages the gradient after it is whitened on
the other dims by their factors (`lather.optim.linalg.kronecker`). The current gradient counts in
its own step: update the factors, refresh the bases, then project into the bases, Adam, project out.

Letters as in `lather.optim.rules.soap`; w_i are the eigenvalues of K_i in the basis Q_i.

Three measures keep the first steps small: eigenvalues begin at 1, not at 0 (whose inverse would
weigh the first gradient by 1 / eps), the first steps are plain Adam, and the second moment is
rotated into every new basis, so that each coordinate is divided by its own moment."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.linalg.kronecker import (
    precondition,
    update_kronecker_factors_kl,
    without_rounding,
)
from lather.optim.options import Betas, Decay, Interval, NonNegative, Positive, Rate, Steps
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.adamw import AdamWRule, adam_moments
from lather.optim.rules.bases import BasisRule, clip_rms


@dataclass(frozen=True)
class KLSOAPRule(BasisRule):
    """SOAP with KL-corrected statistics that include the step's own gradient (arXiv:2509.03378)."""

    lr: Rate
    """Learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of Adam's first and second moment."""
    shampoo_beta: Decay = 0.95
    """Decay rate of the Kronecker factors."""
    eps: Positive = 1e-8
    """Number added to the root of the second moment, and the smallest eigenvalue by which
    statistics divide."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`; coupled decay ("l2") comes after the
    statistics."""
    _: KW_ONLY
    precondition_frequency: Interval = 1
    """Steps between refreshes of the bases. In Python it may also be a function of the step
    (`lather.optim.schedules`)."""
    adam_warmup_steps: Steps = 1
    """Steps of plain Adam, which update the factors, before the step that computes the first
    bases."""
    initial_eigenvalue: Positive = 1.0
    """Eigenvalue by which statistics divide before the first refresh."""
    eigenvalue_floor: NonNegative = 0.0
    """Smallest eigenvalue by which statistics divide, relative to the mean of the factor's
    eigenvalues. Where experts see few tokens, give 1e-3 to 1e-2."""
    nesterov: bool = False
    """Use Nesterov momentum in Adam."""
    correct_bias: bool = True
    """Correct the bias of Adam's moments."""
    max_update_rms: NonNegative = 0.0
    """Scale the update of a matrix down to this root mean square (rms) where it is larger; 0: no
    limit."""

    name: ClassVar[str] = "klsoap"
    refreshes_first: ClassVar[bool] = True
    has_eigenvalues: ClassVar[bool] = True

    def on(self, matrix: Matrix) -> Rule:
        return self if self.dims(matrix) or self.max_update_rms > 0 else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        eigenvalues = {
            f"eigenvalues_{dim}": Entry((matrix.shape[dim],), initial=self.initial_eigenvalue)
            for dim in self.dims(matrix)
        }
        return adam_moments(matrix) | super().state(matrix) | eigenvalues

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        """Update the factors: averages without bias from the first gradient on, whitened by the
        bases of earlier steps."""
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        bases = s.by_dim("basis") if t > self.adam_warmup_steps + 1 else {}
        eigenvalues = s.by_dim("eigenvalues")
        if self.eigenvalue_floor:
            eigenvalues = {
                dim: w.maximum(self.eigenvalue_floor * w.mean(-1, keepdim=True))
                for dim, w in eigenvalues.items()
            }
        update_kronecker_factors_kl(
            s.by_dim("factor"), bases, eigenvalues, g, beta, eps=self.eps, active=s.active
        )

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        bases = s.by_dim("basis") if t > self.adam_warmup_steps else {}
        m, v = s["exp_avg"], s["exp_avg_sq"]
        u = adam_in_basis(
            precondition(self.decayed(g, s), bases, "in"),
            *(m, v, t, self.betas, self.eps),
            correct_bias=self.correct_bias,
            nesterov=self.nesterov,
        )
        u = precondition(u, without_rounding(bases, m.to(u.dtype)), "out")
        return clip_rms(u, self.max_update_rms)

    @property
    def first_refresh(self) -> int:
        return self.adam_warmup_steps + 1


@dataclass(frozen=True)
class REKLSRule(KLSOAPRule):
    """KL-SOAP with a full eigendecomposition of every factor at every step: the exact rule that
    KL-SOAP approximates."""

    _: KW_ONLY
    refresh_method: Literal["qr", "eigh", "cholesky_qr", "root_qr", "auto"] = "eigh"
    """Computation of the new basis. qr, cholesky_qr, root_qr or auto: orthogonal iteration, as in
    KL-SOAP; eigh: a full eigendecomposition."""

    name: ClassVar[str] = "rekls"


@dataclass(frozen=True)
class StackedSOAPRule(KLSOAPRule):
    """KL-SOAP that treats a stack of experts (b, m, n) as one matrix with shared factors; for
    parameters of two dims it is KL-SOAP."""

    _: KW_ONLY
    matrix_layout: Literal["tensor", "per_expert", "stacked", "per_head"] = "stacked"
    """Layout of a parameter. stacked: a stack (b, m, n) is one matrix, (m, b*n) if n <= m,
    otherwise (b*m, n); tensor: the parameter is no stack and stays one tensor; per_head: the
    heads of a matrix of attention are matrices of their own."""

    name: ClassVar[str] = "stacked_soap"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix_layout == "per_expert":
            raise ValueError(
                "matrix_layout='per_expert' is not valid for StackedSOAP: make the groups with "
                "parameter_groups(model, "
                "expert_layout='stacked'), or use KLSOAP for experts one by one"
            )
