"""Scion: the step of a given norm that reduces the loss most, if the momentum is the gradient.

Source: Pethick et al., arXiv:2502.07529, the unconstrained algorithm; with weight decay, the
constrained one. In the spectral norm of an operator from vectors of root mean square 1 to such
vectors the step is orthogonalized; in the largest magnitude of an output, it is the signs. The
state is the momentum alone.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from lather.optim.options import Decay, NonNegative, Range, Rate, is_number
from lather.optim.rule import Entry, Matrix, State
from lather.optim.rules.muon import MuonRule


@dataclass(frozen=True)
class ScionRule(MuonRule):
    """Momentum in steps of a given norm: orthogonalized for hidden matrices, signs for embeddings
    and heads (arXiv:2502.07529)."""

    lr: Rate = 2e-2
    """Learning rate: the radius of the norm ball times the published rate."""
    momentum: Decay = 0.9
    """Decay rate mu of the momentum B; the published alpha is 1 - mu."""
    weight_decay: NonNegative = 0.0
    """Weight decay, wd in `weight_decay_method`. 1 / radius gives the constrained algorithm, which
    keeps weights inside of the norm ball."""
    _: KW_ONLY
    nesterov: bool = False
    """Use Nesterov momentum: take mu B + (1 - mu) G instead of B."""
    scale: Annotated[
        str | float,
        Range(
            "'spectral', 'sign', 'match_rms_adamw' or a number > 0",
            lambda s: s in ("spectral", "sign", "match_rms_adamw") or (is_number(s) and s > 0),
        ),
    ] = "spectral"
    """Norm of a matrix (m, n) in which every update has the same size. spectral: orthogonalized,
    times sqrt(max(1, m / n)); sign: the signs divided by n, without Newton-Schulz, for embeddings
    and heads; match_rms_adamw or a number: as under Muon. Vectors take AdamW's step at the same
    rate in any case: leave them out of a group with sign."""

    name: ClassVar[str] = "scion"

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = super().state(matrix)
        if self.scale == "sign":
            entries.pop("row_moment", None)  # rows of signs have one norm already
        return entries

    def finished(self, x: Tensor, s: State) -> Tensor:
        """Return U for x (B, m, n), in the norm that `scale` names."""
        return x.sign() / x.shape[-1] if self.scale == "sign" else super().finished(x, s)
