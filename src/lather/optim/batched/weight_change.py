"""The change of weights by their updates, in place and rounded once to the dtype of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lather.device import is_gpu
from lather.kernels.narrow_updates import change_by_
from lather.kernels.narrow_weights import change_
from lather.optim.batched.remainders import round_weights, wide_weights
from lather.optim.batched.roster import Change
from lather.torch_private import foreach_add_, foreach_mul_, fused_sgd_


def change_weights(
    weights: list[Tensor],
    updates: list[Tensor],
    change: Change,
    step: int = 0,
    remainders: Sequence[Any] = (),
) -> None:
    """Change weights by their updates, W <- (1 - decay) W - lr U, in place and rounded once to
    their dtype. All weights have one dtype, and all updates. `step`: t, for stochastic rounding;
    `remainders`: those of bf16 weights, if they have any, which change with them.

    Every update of every rank passes through here, but for those of a kernel that updates state and
    weights together (`Rule.step_whole`)."""
    if not weights:
        return
    if change.replaces:
        round_weights(updates, weights, change.rounding, step, remainders)
        return
    if _change_fused(weights, updates, change, step, remainders):
        return
    dtype = torch.promote_types(weights[0].dtype, updates[0].dtype)
    is_wide = dtype == weights[0].dtype
    wide = weights if is_wide else wide_weights(weights, dtype, remainders)
    if change.decay:
        foreach_mul_(wide, 1 - change.decay)
    foreach_add_(wide, updates, alpha=-change.lr)
    if not is_wide:
        round_weights(wide, weights, change.rounding, step, remainders)


def _change_fused(
    weights: list[Tensor],
    updates: list[Tensor],
    change: Change,
    step: int,
    remainders: Sequence[Any],
) -> bool:
    """Change weights on a GPU by kernels that read and write them once, if there are any for them;
    return whether it did."""
    if not is_gpu(weights[0]):
        return False
    dtypes = weights[0].dtype, updates[0].dtype
    if dtypes == (torch.bfloat16, torch.float32) and change.rounding != "nearest":
        rest = remainders if change.rounding == "remainder" else [None] * len(weights)
        for w, u, r in zip(weights, updates, rest, strict=True):
            change_(w, u, r, decay=change.decay, lr=change.lr, step=step)
        return True
    if dtypes == (torch.float32, torch.bfloat16) and change.lr:
        for w, u in zip(weights, updates, strict=True):
            change_by_(w, u, change.decay, change.lr)
        return True
    are_plain = all(map(Tensor.is_contiguous, weights + updates))
    if dtypes[0] != dtypes[1] or not change.lr or not are_plain:
        return False
    fused_sgd_(
        *(weights, updates, []),
        lr=change.lr,
        weight_decay=change.decay / change.lr,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    return True
