"""Base classes of rules with Kronecker factors: which sides of a matrix have one; for rules with
eigenbases also which state belongs to a basis, and how it is refreshed.

Letters: K_i the Kronecker factor of dim i (`factor_i`), Q_i its eigenbasis (`basis_i`), w_i the
eigenvalues (`eigenvalues_i`), M and V the moments in the bases (`exp_avg`, `exp_avg_sq`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lather.optim.linalg.eigenbasis import (
    DEFAULT_TOLERANCE,
    is_still_diagonal,
    is_zero,
    rayleigh_quotients,
    update_eigenbasis_and_momentum,
)
from lather.optim.linalg.scale import column
from lather.optim.options import Count, Interval, NonNegative, Range, at_least, is_number
from lather.optim.rule import Entry, Matrix, RefreshingRule, Rule, State, rms

LONG = 8
"""Ratio of the sides of a matrix above which `sides="auto"` gives no basis to the longer side."""


@dataclass(frozen=True)
class SidedRule(Rule):
    """Base class of rules with a Kronecker factor for each side of a matrix, or for some."""

    _: KW_ONLY
    sides: Literal["both", "smaller", "larger", "auto"] = "both"
    """Sides of a matrix that are preconditioned, each by a Kronecker factor. auto: only the smaller
    side if the other is more than 8 times as long (both sides of a 4096 x 8 LoRA matrix would need
    hundreds of times the memory of its weights), otherwise both."""
    max_precond_dim: Annotated[int, at_least(0, " (0: no preconditioning)")] = 8192
    """Largest size of a dim that is preconditioned; 0: none is, so the group takes AdamW's step."""
    precondition_1d: bool = False
    """Precondition vectors, too; otherwise they take AdamW's step."""

    def dims(self, matrix: Matrix) -> tuple[int, ...]:
        if 0 in matrix.shape or (matrix.num_dims < 2 and not self.precondition_1d):
            return ()
        wanted = tuple(range(len(matrix.shape)))
        if matrix.is_matrix and self.sides != "both":
            m, n = matrix.shape
            smaller = int(m > n)
            if self.sides != "auto" or max(m, n) > LONG * min(m, n):
                wanted = (1 - smaller,) if self.sides == "larger" else (smaller,)
        return tuple(dim for dim in wanted if matrix.shape[dim] <= self.max_precond_dim)


@dataclass(frozen=True)
class BasisRule(SidedRule, RefreshingRule):
    """Base class of SOAP, KL-SOAP and SOAP-Muon."""

    _: KW_ONLY
    precondition_frequency: Interval = 10
    """Steps between refreshes of the bases. In Python it may also be a function of the step
    (`lather.optim.schedules`)."""
    refresh_method: Literal["qr", "eigh", "cholesky_qr", "root_qr", "auto"] = "auto"
    """Computation of the new basis. qr, cholesky_qr, root_qr: three algorithms for one step of
    orthogonal iteration; auto: the best of the three for the size and the device; eigh: a full
    eigendecomposition."""
    first_bases: Literal["auto", "eigh", "iteration"] = "auto"
    """Computation of the first bases. eigh: a full eigendecomposition, which
    `refresh_method="eigh"` always uses; iteration: four steps of batched orthogonal iteration from
    the identity; auto: iteration on a GPU for n > 64, otherwise eigh."""
    power_iter_steps: Count = 1
    """Steps of orthogonal iteration per refresh."""
    second_moment: Literal["permute", "rotate"] = "rotate"
    """Change of the second moment when a basis changes. permute: its entries follow the re-ordered
    columns; rotate: it is rotated into the new basis (`lather.optim.linalg.eigenbasis`)."""
    use_adaptive_criteria: bool = False
    """Do not refresh a basis that still diagonalizes its factor to within
    `adaptive_update_tolerance`."""
    adaptive_update_tolerance: Annotated[
        float | None,
        Range(
            "a number in (0, 1) or None",
            lambda tol: tol is None or (is_number(tol, below=1.0) and tol > 0),
        ),
    ] = None
    """Relative tolerance of `use_adaptive_criteria`; None: 1e-7."""

    has_eigenvalues: ClassVar[bool] = False
    """Whether the state holds the eigenvalues of each basis, too (`eigenvalues_i`)."""

    @property
    def turns_momentum(self) -> bool:
        """Whether the momentum `exp_avg` is in the coordinates of the bases, and so is rotated at a
        refresh."""
        return True

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = {}
        for dim in self.dims(matrix):
            n = matrix.shape[dim]
            entries[f"factor_{dim}"] = Entry((n, n), "factor")
            entries[f"basis_{dim}"] = Entry((n, n), "basis", None)
        return entries

    def methods(self, first: bool) -> tuple[str, ...]:
        if self.refresh_method == "eigh" or (first and self.first_bases == "eigh"):
            return ("eigh",)
        if first:
            return ("first" if self.first_bases == "auto" else "iteration", "eigh")
        return ("qr",) if self.refresh_method == "qr" else (self.refresh_method, "qr")

    def refresh(self, s: State, dim: int, method: str, first: bool) -> Tensor:
        k, q, v = s[f"factor_{dim}"], s[f"basis_{dim}"], s["exp_avg_sq"]
        m = s["exp_avg"] if self.turns_momentum else None
        w = s[f"eigenvalues_{dim}"] if self.has_eigenvalues else None
        return update_eigenbasis_and_momentum(
            k,
            q,
            m,
            v,
            dim,
            method=method,
            second_moment=self.second_moment,
            power_iter_steps=self.power_iter_steps,
            eigenvalues=w,
        )

    def fits(self, s: State, dim: int) -> Tensor | None:
        if not self.use_adaptive_criteria:
            return None
        k, q = s[f"factor_{dim}"], s[f"basis_{dim}"]
        good = is_still_diagonal(k, q, self.adaptive_update_tolerance or DEFAULT_TOLERANCE)
        if self.has_eigenvalues:
            w, renewed = s[f"eigenvalues_{dim}"], good & ~is_zero(k)
            w.copy_(w.where(~renewed[:, None], rayleigh_quotients(k, q)))
        return good


Warmup = Annotated[
    int, Range("an integer", lambda steps: isinstance(steps, int) and not isinstance(steps, bool))
]


def clip_rms(u: Tensor, max_rms: NonNegative) -> Tensor:
    """Scale each matrix of u (B, ...) down to root mean square `max_rms` if it has more; 0: return
    u unchanged."""
    if max_rms == 0:
        return u
    return u * column((max_rms / (rms(u) + 1e-12)).clamp(max=1), u)
