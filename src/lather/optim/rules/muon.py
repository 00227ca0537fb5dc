"""Muon: momentum, orthogonalised. NorMuon: the rows of what comes out evened, too.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the scale that matches AdamW's rms, Liu et al.,
arXiv:2502.16982; NorMuon, arXiv:2510.05491. B momentum, N its Nesterov numerator, U update; one tensor of state per matrix.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.engine.optimizer import MatrixOptimizer, constructor
from lather.optim.linalg.newton_schulz import orthogonalize, update_scale
from lather.optim.options import Count, Decay, NonNegative, Range, Rate, is_number
from lather.optim.rule import Entry, Matrix, Rule, State
from lather.optim.rules.adamw import AdamWRule


def is_scale(value: object) -> bool:
    """Whether it is one of the scales of an update."""
    return value in ("match_rms_adamw", "spectral") or (is_number(value) and value != 0)


@dataclass(frozen=True)
class MuonRule(Rule):
    """Momentum, orthogonalised by Newton-Schulz; vectors take AdamW's step at the same rate."""

    lr: Rate = 1e-2
    """Learning rate."""
    momentum: Decay = 0.95
    """mu, the decay rate of B."""
    weight_decay: NonNegative = 0.01
    """wd of `weight_decay_method`."""
    _: KW_ONLY
    nesterov: bool = True
    """Orthogonalise mu B + (1 - mu) G instead of B."""
    steps: Count = 5
    """Steps of Newton-Schulz; 3 cost no loss that was seen."""
    coefficients: Literal["quintic", "polar_express"] = "quintic"
    """Of Newton-Schulz: Jordan's at every step, or the sequence of the Polar Express."""
    scale: Annotated[str | float, Range("'match_rms_adamw', 'spectral' or a number > 0", is_scale)] = "match_rms_adamw"
    """match_rms_adamw: 0.2 sqrt(max(m, n)), so that AdamW's rates fit; spectral: sqrt(max(1, m / n)); or a number."""
    newton_schulz_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the iteration; auto: bfloat16 on CUDA, that of the state's arithmetic on a CPU."""
    normalize: Annotated[str | None, Range("'row' or None", lambda value: value in (None, "row"))] = None
    """row: divide each row of U by the root of its running second moment, and restore U's norm (NorMuon)."""
    beta2: Decay = 0.95
    """Decay rate of the rows' second moments."""

    name: ClassVar[str] = "muon"

    def on(self, matrix: Matrix) -> Rule:
        return self if matrix.is_matrix else self.turned_into(AdamWRule)

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        entries = {"momentum_buffer": Entry(matrix.shape, "moment")}
        return entries | ({"row_moment": Entry(matrix.shape[:1])} if self.normalize else {})

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        return self.finished(numerator(self.decayed(g, s), s["momentum_buffer"], self.momentum, self.nesterov), s)

    def finished(self, x: Tensor, s: State) -> Tensor:
        """U of x (B, m, n): orthogonalised, its rows evened if asked, and scaled."""
        dtype = None if self.newton_schulz_dtype == "auto" else getattr(torch, self.newton_schulz_dtype)
        u = orthogonalize(x, self.steps, self.coefficients, dtype)
        if self.normalize:
            v = s["row_moment"].lerp_(u.square().mean(-1), 1 - self.beta2)
            even = u / (v.sqrt() + 1e-8).unsqueeze(-1)
            norm, new_norm = (torch.linalg.matrix_norm(one, keepdim=True) for one in (u, even))
            u = even * (norm / new_norm.clamp_min(1e-30))
        return u * update_scale(u.shape[1:], self.scale)

    def cost(self, matrix: Matrix) -> float:
        return float(self.steps * min(matrix.shape) * matrix.numel) if matrix.is_matrix else float(matrix.numel)


def numerator(g: Tensor, b: Tensor, mu: float, nesterov: bool) -> Tensor:
    """B <- mu B + (1 - mu) G in place; then mu B + (1 - mu) G, or B without Nesterov."""
    b.lerp_(g, 1 - mu)
    return g.lerp(b, mu) if nesterov else b


class Muon(MatrixOptimizer):
    """Momentum, orthogonalised by Newton-Schulz, per matrix and per expert; vectors take AdamW's step at the same rate."""

    rule = MuonRule

    @constructor(MuonRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)
