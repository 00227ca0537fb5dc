"""AdamW: for embeddings, heads, norms and biases, and for every parameter in which another rule
finds no matrix.

Source: Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101. The update of an
element depends on that element alone, so parameters of all shapes form one batch. Where the options
allow it, torch's fused kernel takes the step in one launch without temporaries.

On a CPU that kernel rounds the last elements of a tensor, which do not fill a vector register,
differently from the others. Which elements are last depends on how a parameter is sharded, but
results must not. The last elements of all parameters, and small parameters as a whole, are
therefore concatenated, padded to whole registers, and updated by the kernel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lather.device import is_gpu
from lather.kernels.adam_in_basis import adam_in_basis
from lather.optim.options import Betas, NonNegative, Rate
from lather.optim.rule import Entry, Matrix, Rule, State, Tensors
from lather.torch_private import foreach_copy_, fused_adamw_

VECTOR = 16
"""Elements in the longest vector register of a CPU."""
SMALL = 1024
"""Elements from which on a tensor is divided; all elements of a smaller one are concatenated, since
that takes less time than to divide it."""


def _divided(
    tensors: Tensors, sizes: Sequence[int], tails: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Divide tensors of these sizes into those parts that fill whole registers and their last
    elements, of which each has so many (`tails`). Empty tensors are left out."""
    begins, ends = list[Tensor](), list[Tensor]()
    for x, size, tail in zip(tensors, sizes, tails, strict=True):
        flat = x if x.dim() == 1 or not tail else x.view(-1)
        if 0 < tail < size:
            begin, flat = flat.split([size - tail, tail])
            begins.append(begin)
        if size:
            (ends if tail else begins).append(flat)
    return begins, ends


def adam_moments(matrix: Matrix, momentum: str = "exp_avg") -> dict[str, Entry]:
    """Return Adam's two moments, the first of them under the name `momentum`."""
    return {
        momentum: Entry(matrix.shape, "moment"),
        "exp_avg_sq": Entry(matrix.shape, "moment", nonnegative=True),
    }


@dataclass(frozen=True)
class AdamWRule(Rule):
    """Adam with decoupled weight decay."""

    lr: Rate = 1e-3
    """Learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: NonNegative = 1e-8
    """Number added to the root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Weight decay, wd in `weight_decay_method`."""
    _: KW_ONLY
    nesterov: bool = False
    """Use Nesterov momentum."""
    correct_bias: bool = True
    """Correct the bias of the moments: divide them by 1 - beta^t."""

    name: ClassVar[str] = "adamw"
    elementwise: ClassVar[bool] = True

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return adam_moments(matrix)

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        x, m, v = self.decayed(g, s), s["exp_avg"], s["exp_avg_sq"]
        return adam_in_basis(
            *(x, m, v, t, self.betas, self.eps),
            correct_bias=self.correct_bias,
            nesterov=self.nesterov,
        )

    def step_whole(
        self, weights: Tensors, grads: Tensors, states: Mapping[str, Tensors], t: int, lr: float
    ) -> bool:
        """Take the step with torch's fused kernel if it supports the options, and parameters,
        gradients and moments have one dtype."""
        dtype = states["exp_avg"][0].dtype
        dtypes = {x.dtype for x in (*weights, *grads)}
        is_plain = self.correct_bias and not (self.couples_decay or self.nesterov)
        if not is_plain or lr == 0 or weights[0].is_meta:
            return False
        if dtype == torch.bfloat16 or dtypes != {dtype}:
            return False
        four = (weights, grads, states["exp_avg"], states["exp_avg_sq"])
        sizes = [x.numel() for x in weights]
        tails = [n % VECTOR and (n if n < SMALL else n % VECTOR) for n in sizes]
        if is_gpu(weights[0]) or not any(tails):
            self._fused(four, t, lr)
            return True
        divided = [_divided(tensors, sizes, tails) for tensors in four]
        padding = weights[0].new_zeros(-sum(tails) % VECTOR)
        filled = [torch.cat([*ends, padding]) for _, ends in divided]
        self._fused([[*x, end] for (x, _), end in zip(divided, filled, strict=True)], t, lr)
        lengths = list(filter(None, tails))
        for kind in (0, 2, 3):
            foreach_copy_(divided[kind][1], list(filled[kind][: sum(tails)].split(lengths)))
        return True

    def _fused(self, four: Sequence[Tensors], t: int, lr: float) -> None:
        weights, grads, exp_avgs, exp_avg_sqs = map(list, four)
        step = torch.full((), float(t), dtype=torch.float32, device=weights[0].device)
        beta1, beta2 = self.betas
        fused_adamw_(
            *(weights, grads, exp_avgs, exp_avg_sqs, [], [step] * len(weights)),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.decay(lr) / lr,
            eps=self.eps,
            amsgrad=False,
            maximize=self.maximize,
        )
