"""Muon (Jordan et al., 2024), and NorMuon (arXiv:2510.05491). B momentum, N its Nesterov numerator, U update; one tensor of state each."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.engine.optimizer import MatrixOptimizer, constructor
from lather.optim.linalg.newton_schulz import orthogonalize, update_scale, with_norm_of
from lather.optim.options import Count, Decay, NonNegative, Range, Rate, Scale
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.adamw import AdamWRule


@dataclass(frozen=True)
class MuonRule(Rule):
    """Momentum, orthogonalised by Newton-Schulz; vectors take AdamW's step at the same rate."""

    lr: Rate = 1e-2
    """Learning rate."""
    momentum: Decay = 0.95
    """mu, the decay rate of B."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`."""
    _: KW_ONLY
    nesterov: bool = True
    """Orthogonalise mu B + (1 - mu) G instead of B."""
    steps: Count = 5
    """Steps of Newton-Schulz; 3 cost no loss that was seen."""
    coefficients: Literal["quintic", "polar_express"] = "quintic"
    """Coefficients of Newton-Schulz: Jordan's at every step, or the sequence of the Polar Express."""
    scale: Scale = "match_rms_adamw"
    """match_rms_adamw: 0.2 sqrt(max(m, n)), so that AdamW's rates fit; spectral: sqrt(max(1, m / n)); or a number."""
    newton_schulz_dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
    """dtype of the iteration; auto: bfloat16 on CUDA, that of the state's arithmetic on a CPU; fastest: bfloat16 also on a CPU that is
    faster in it (AMX, or AMD with AVX512-BF16)."""
    normalize: Annotated[str | None, Range("'row' or None", (None, "row").__contains__)] = None
    """row: divide each row of U by the root of its running second moment, and restore U's norm (NorMuon)."""
    beta2: Decay = 0.95
    """Decay rate of second moments: of rows, and of V in SOAP-Muon."""

    name: ClassVar[str] = "muon"

    def on(self, matrix: Matrix) -> Rule:
        return self if matrix.is_matrix else self.on_vectors()

    def on_vectors(self) -> AdamWRule:
        return self.turned_into(AdamWRule, nesterov=False)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"momentum_buffer": Entry(matrix.shape, "moment")} | ({"row_moment": Entry(matrix.shape[:1])} if self.normalize else {})

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        return self.finished(self.numerator(self.decayed(g, s), s), s)

    def numerator(self, g: Tensor, s: State) -> Tensor:
        """B <- mu B + (1 - mu) G in place; then N = mu B + (1 - mu) G, or B without Nesterov."""
        b = s["momentum_buffer"].lerp_(g, 1 - self.momentum)
        return g.lerp(b, self.momentum) if self.nesterov else b

    def finished(self, x: Tensor, s: State) -> Tensor:
        """U of x (B, m, n): orthogonalised, its rows evened if asked, and scaled."""
        u = orthogonalize(x, self.steps, self.coefficients, self.newton_schulz_dtype)
        if self.normalize:
            v = s["row_moment"].lerp_(u.square().mean(-1), 1 - self.beta2)
            u = with_norm_of(u, u / (v.sqrt() + 1e-8).unsqueeze(-1))
        return u.mul_(update_scale(u.shape[1:], self.scale))


class Muon(MatrixOptimizer):
    """Momentum, orthogonalised by Newton-Schulz, per matrix and per expert; vectors take AdamW's step at the same rate."""

    rule = MuonRule

    @constructor(MuonRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)
