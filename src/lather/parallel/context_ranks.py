"""The exchange between context ranks: an all-gather in the forward pass, and in the backward pass
an all-to-all whose parts are summed in a fixed order.

A reduce-scatter would send as many bytes, but sum in an order that depends on the ranks' places in
a ring, and in the dtype of the gradients. Here the sum over the ranks is in fp32 (fp64 for fp64),
rank 0 first, rounded once.

Letters: C context ranks, B sequences, S positions of a rank, T = C * S positions, X elements of all
tensors at a position, H = S / 2 positions of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from lather.kernels.backend import wide_dtype
from lather.models.context import Context
from lather.parallel.expert_exchange import resize_away
from lather.shapes import Float
from lather.torch_private import all_gather_single

EXCHANGE = "lather.context"
"""Name of the range of an exchange in profiles."""


@dataclass(frozen=True)
class ContextRanks(Context):
    """The context ranks of a process group, whose order is that of the slices."""

    group: dist.ProcessGroup | None = None

    def gather(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        gathered: tuple[Tensor, ...] = _GatherPositions.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return gathered

    def add_up(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: ContextRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.shapes = ranks, [x.shape[2:] for x in tensors]
        sent_BSX = torch.cat([x.flatten(2) for x in tensors], dim=-1)
        parts_CBSX = sent_BSX.new_empty(ranks.size, *sent_BSX.shape)
        with record_function(EXCHANGE):
            all_gather_single(parts_CBSX.view(-1), sent_BSX.view(-1), group=ranks.group)
        gathered = tuple(
            in_order(part).view(*sent_BSX.shape[:1], -1, *shape)
            for part, shape in zip(_split(parts_CBSX, ctx.shapes), ctx.shapes, strict=True)
        )
        resize_away(sent_BSX)
        resize_away(parts_CBSX)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks: ContextRanks = ctx.ranks
        grad_BTX = torch.cat([grad.flatten(2) for grad in grads], dim=-1)
        sent_CBSX = by_rank(grad_BTX, ranks.size)
        received_CBSX = torch.empty_like(sent_CBSX)
        with record_function(EXCHANGE):
            dist.all_to_all_single(received_CBSX, sent_CBSX, group=ranks.group)
        first, *others = received_CBSX.unbind()
        total_BSX = first.to(wide_dtype(first))
        for part_BSX in others:
            total_BSX = total_BSX + part_BSX
        resize_away(sent_CBSX)
        resize_away(received_CBSX)
        parts = _split(total_BSX.to(grad_BTX.dtype), ctx.shapes)
        return None, *(
            part.reshape(*part.shape[:2], *shape)
            for part, shape in zip(parts, ctx.shapes, strict=True)
        )


def _split(x: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """Return the elements of each tensor of these shapes from those of all, the last dim of x."""
    return x.split([shape.numel() for shape in shapes], dim=-1)


def in_order(parts_CBSX: Float[Tensor, "c b s x"]) -> Float[Tensor, "b t x"]:
    """Return the positions of all ranks in the order of the sequence."""
    first_CBHX, last_CBHX = parts_CBSX.chunk(2, dim=2)
    return torch.cat([*first_CBHX, *last_CBHX.flip(0)], dim=1)


def by_rank(x_BTX: Float[Tensor, "b t x"], num_ranks: int) -> Float[Tensor, "c b s x"]:
    """Return the positions of each rank: the inverse of `in_order`."""
    slices = x_BTX.chunk(2 * num_ranks, dim=1)
    return torch.stack(
        [torch.cat((slices[rank], slices[-1 - rank]), dim=1) for rank in range(num_ranks)]
    )
