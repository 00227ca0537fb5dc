"""KL-SOAP, REKLS and stacked SOAP: Adam in the eigenbases of factors that are estimated by minimising a KL divergence.

Source: Lin et al., "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization", arXiv:2509.03378. The statistics of
a dim weigh the others by the inverse of their own (`lather.optim.linalg.kronecker`), the step's own gradient included: statistics,
refresh, then project in, Adam, project out.

Letters as in `lather.optim.rules.soap`; w_i are the eigenvalues that basis Q_i stands for.

A safe start: eigenvalues begin at 1, not at 0 (whose inverse would make the first gradient count for 1 / eps), the first steps are plain
Adam, and the second moment is rotated into every new basis, so that no coordinate meets a denominator that is not its own.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.engine.optimizer import MatrixOptimizer, constructor
from lather.optim.linalg.kronecker import precondition, update_kronecker_factors_kl
from lather.optim.options import Betas, Decay, Interval, NonNegative, Positive, Rate, Steps
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.bases import BasisRule, clip_rms


@dataclass(frozen=True)
class KLSOAPRule(BasisRule):
    """SOAP with KL-corrected statistics that include the step's own gradient (arXiv:2509.03378)."""

    lr: Rate
    """Learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    shampoo_beta: Decay = 0.95
    """Decay rate of the Kronecker factors."""
    eps: Positive = 1e-8
    """Added to the root of the second moment, and the least eigenvalue that statistics divide by."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`; coupled decay ("l2") comes after the statistics."""
    _: KW_ONLY
    precondition_frequency: Interval = 1
    """Steps between refreshes of the bases; in Python also a callable of the step (`lather.optim.schedules`)."""
    adam_warmup_steps: Steps = 1
    """Plain Adam for this many steps, while statistics gather; the first bases come in the step after. 0: at once."""
    initial_eigenvalue: Positive = 1.0
    """Eigenvalue that statistics divide by before the first refresh."""
    eigenvalue_floor: NonNegative = 0.0
    """Least eigenvalue that statistics divide by, relative to the mean of its factor's; where experts see few tokens 1e-3 to 1e-2."""
    nesterov: bool = False
    """Adam's momentum one step ahead."""
    correct_bias: bool = True
    """Adam's bias correction."""
    max_update_rms: NonNegative = 0.0
    """Clip each matrix's update to this rms; 0: no clipping."""

    name: ClassVar[str] = "klsoap"
    refreshes_first: ClassVar[bool] = True
    has_eigenvalues: ClassVar[bool] = True

    def on(self, matrix: Matrix) -> Rule:
        return self if self.dims(matrix) or self.max_update_rms > 0 else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = {key: Entry(matrix.shape, "moment") for key in ("exp_avg", "exp_avg_sq")} | super().state(matrix)
        return entries | {f"eigenvalues_{dim}": Entry((matrix.shape[dim],), initial=self.initial_eigenvalue) for dim in self.dims(matrix)}

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        """An average, unbiased from the first gradient on, whitened by the bases of earlier steps."""
        beta = 1 - (1 - self.shampoo_beta) / (1 - self.shampoo_beta**t)
        bases = s.by_dim("basis") if t > self.adam_warmup_steps + 1 else {}
        eigenvalues = s.by_dim("eigenvalues")
        if self.eigenvalue_floor:
            eigenvalues = {dim: w.maximum(self.eigenvalue_floor * w.mean(-1, keepdim=True)) for dim, w in eigenvalues.items()}
        update_kronecker_factors_kl(s.by_dim("factor"), bases, eigenvalues, g, beta, eps=self.eps, active=s.active)

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        bases = s.by_dim("basis") if t > self.adam_warmup_steps else {}
        x, m, v, nesterov = precondition(self.decayed(g, s), bases, "in"), s["exp_avg"], s["exp_avg_sq"], self.nesterov
        u = adam_in_basis(x, m, v, t, self.betas, self.eps, correct_bias=self.correct_bias, nesterov=nesterov)
        return clip_rms(precondition(u, bases, "out"), self.max_update_rms)

    @property
    def first_refresh(self) -> int:
        return self.adam_warmup_steps + 1


@dataclass(frozen=True)
class REKLSRule(KLSOAPRule):
    """KL-SOAP with a whole eigendecomposition of every factor at every step: the exact rule that KL-SOAP follows from afar."""

    _: KW_ONLY
    refresh_method: Literal["qr", "eigh", "cholesky_qr", "root_qr", "auto"] = "eigh"
    """qr, cholesky_qr, root_qr or auto: orthogonal iteration, as in KL-SOAP; eigh: whole eigendecompositions."""

    name: ClassVar[str] = "rekls"


@dataclass(frozen=True)
class StackedSOAPRule(KLSOAPRule):
    """KL-SOAP in which a stack of experts (b, m, n) is one matrix with shared factors; on parameters of two dims it is KL-SOAP."""

    _: KW_ONLY
    matrix_layout: Literal["tensor", "per_expert", "stacked"] = "stacked"
    """stacked: (b, m, n) is the one matrix (m, b*n) if n <= m, else (b*m, n); tensor, for parameters that are no stack."""

    name: ClassVar[str] = "stacked_soap"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix_layout == "per_expert":
            raise ValueError(
                "matrix_layout='per_expert' is not valid for StackedSOAP: make the groups with parameter_groups(model, "
                "expert_layout='stacked'), or use KLSOAP for experts one by one"
            )


class KLSOAP(MatrixOptimizer):
    """SOAP with KL-corrected statistics that include the step's own gradient (arXiv:2509.03378)."""

    rule = KLSOAPRule

    @constructor(KLSOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class REKLS(KLSOAP):
    """KLSOAP with a whole eigendecomposition of every factor at every step: the exact rule that KLSOAP follows from afar."""

    rule = REKLSRule

    @constructor(REKLSRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        MatrixOptimizer.__init__(self, params, rule)


class StackedSOAP(KLSOAP):
    """KLSOAP in which a stack of experts (b, m, n) is one matrix with shared factors, refreshed at every step."""

    rule = StackedSOAPRule

    @constructor(StackedSOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        MatrixOptimizer.__init__(self, params, rule)
