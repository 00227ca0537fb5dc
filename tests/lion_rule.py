"""A user's own rule, as `--optim.name lion_rule:Lion` names it: Lion (arXiv:2302.06675) on
matrices, AdamW on vectors."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from lather.optim import AdamW, Entry, Matrix, Rule, State


@dataclass(frozen=True)
class Lion(Rule):
    """Steps by the sign of a momentum."""

    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of the sign's momentum and of the one that is kept."""
    weight_decay: float = 0.01
    """wd of `weight_decay_method`."""

    def on(self, matrix: Matrix) -> Rule:
        return self if matrix.is_matrix else self.turned_into(AdamW.rule, betas=(0.9, 0.95))

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"exp_avg": Entry(matrix.shape, "moment")}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g, m = self.decayed(g, s), s["exp_avg"]
        u = m.lerp(g, 1 - self.betas[0]).sign()
        m.lerp_(g, 1 - self.betas[1])
        return u


@dataclass(frozen=True)
class Scheduled(Lion):
    """A rule with an option's name that `[optim]` has for itself, so that the trainer cannot take
    it."""

    schedule: str = "mine"
    """An option with a name that `[optim]` has for itself."""


@dataclass(frozen=True)
class Strong(Rule):
    """A rule with an option that has no default."""

    _: KW_ONLY
    strength: float
    """An option that has no default."""
