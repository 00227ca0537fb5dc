"""Lion: the sign of a blend of momentum and gradient."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim import Entry, Matrix, MatrixOptimizer, Rule, State, constructor
from lather.optim.options import Betas, NonNegative, Rate


@dataclass(frozen=True)
class LionRule(Rule):
    """The sign of a blend of momentum and gradient (arXiv:2302.06675)."""

    lr: Rate = 3e-4
    """Learning rate."""
    betas: Betas = (0.9, 0.99)
    """Share of the momentum in the blend, and decay rate of the momentum."""
    weight_decay: NonNegative = 0.0
    """Weight decay, wd in `weight_decay_method`."""

    elementwise: ClassVar[bool] = True

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {"exp_avg": Entry(matrix.shape, "moment")}

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        g, m = self.decayed(g, s), s["exp_avg"]
        u = g.lerp(m, self.betas[0]).sign()
        m.lerp_(g, 1 - self.betas[1])
        return u


class Lion(MatrixOptimizer):
    """Lion as a torch optimizer, whose arguments editors know."""

    rule = LionRule

    @constructor(LionRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)
