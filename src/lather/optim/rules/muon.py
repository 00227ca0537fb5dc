"""Muon (Jordan et al., 2024) and NorMuon (arXiv:2510.05491).

Letters: B momentum, N the Nesterov combination of B and the gradient, U update. The state is B
alone, and with NorMuon one number per row."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lather.optim.linalg.newton_schulz import orthogonalize, update_scale, with_norm_of
from lather.optim.options import Count, Decay, NonNegative, Range, Rate, Scale
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.adamw import AdamWRule


@dataclass(frozen=True)
class MuonRule(Rule):
    """Momentum, orthogonalized by Newton-Schulz; vectors take AdamW's step at the same learning
    rate."""

    lr: Rate = 1e-2
    """Learning rate."""
    momentum: Decay = 0.95
    """Decay rate mu of the momentum B."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`."""
    _: KW_ONLY
    nesterov: bool = True
    """Use Nesterov momentum: orthogonalize mu B + (1 - mu) G instead of B."""
    steps: Count = 5
    """Steps of the Newton-Schulz iteration. In no measured run did 3 steps raise the loss."""
    coefficients: Literal["quintic", "polar_express"] = "quintic"
    """Coefficients of the Newton-Schulz iteration. quintic: Jordan's, the same at every step;
    polar_express: a sequence that changes from step to step."""
    scale: Scale = "match_rms_adamw"
    """Factor by which the orthogonalized update is multiplied. match_rms_adamw: 0.2 sqrt(max(m,
    n)), which gives the update about the rms of AdamW's; spectral: sqrt(max(1, m / n)); or a
    number."""
    newton_schulz_dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
    """dtype of the Newton-Schulz iteration. auto: that of all other arithmetic, but bfloat16 for
    float32 on CUDA; fastest: bfloat16 also for float32 on a CPU that multiplies it faster (AMX, or
    AMD with AVX512-BF16)."""
    normalize: Annotated[str | None, Range("'row' or None", (None, "row").__contains__)] = None
    """row: divide each row of U by the root of that row's second moment and restore the norm of U
    (NorMuon); None: leave U as it is."""
    beta2: Decay = 0.95
    """Decay rate of the second moments: of rows (NorMuon), and of V in SOAP-Muon."""

    name: ClassVar[str] = "muon"

    def on(self, matrix: Matrix) -> Rule:
        return self if matrix.is_matrix else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule, nesterov=False)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"momentum_buffer": Entry(matrix.shape, "moment")} | (
            {"row_moment": Entry(matrix.shape[:1])} if self.normalize else {}
        )

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        return self.finished(self.numerator(self.decayed(g, s), s), s)

    def numerator(self, g: Tensor, s: State) -> Tensor:
        """Update B = mu B + (1 - mu) G in place and return N = mu B + (1 - mu) G, or B without
        Nesterov momentum."""
        b = s["momentum_buffer"].lerp_(g, 1 - self.momentum)
        return g.lerp(b, self.momentum) if self.nesterov else b

    def finished(self, x: Tensor, s: State) -> Tensor:
        """Return U for x (B, m, n): orthogonalized, with normalized rows if `normalize` says so,
        and scaled."""
        u = orthogonalize(x, self.steps, self.coefficients, self.newton_schulz_dtype)
        if self.normalize:
            v = s["row_moment"].lerp_(u.square().mean(-1), 1 - self.beta2)
            u = with_norm_of(u, u / (v.sqrt() + 1e-8).unsqueeze(-1))
        return u.mul_(update_scale(u.shape[1:], self.scale))
