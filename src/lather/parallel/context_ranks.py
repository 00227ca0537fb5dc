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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lather.device import is_gpu
from lather.kernels.backend import wide_dtype
from lather.kernels.combine import combine_forward
from lather.models.context import Context
from lather.models.pending import Pending
from lather.parallel.expert_exchange import record_use, resize_away
from lather.profiled import profiled
from lather.shapes import Float
from lather.torch_private import all_gather_single

EXCHANGE = "lather.context"
"""Name of the range of an exchange in profiles."""


@dataclass(frozen=True)
class ContextRanks(Context):
    """The context ranks of a process group, whose order is that of the slices. Buffers are freed
    when the communication that needs them is waited for."""

    group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def start_gather(self, tensors: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        shapes = [x.shape[2:] for x in tensors]
        sent_BSX = torch.cat([x.flatten(2) for x in tensors], dim=-1)
        parts_CBSX = sent_BSX.new_empty(self.size, *sent_BSX.shape)
        with record_function(EXCHANGE):
            work = all_gather_single(
                parts_CBSX.view(-1), sent_BSX.view(-1), group=self.group, async_op=True
            )

        def finish() -> tuple[Tensor, ...]:
            with profiled("context"):
                work.wait()
            record_use(sent_BSX, parts_CBSX)
            gathered = tuple(
                in_order(part).view(*sent_BSX.shape[:1], -1, *shape)
                for part, shape in zip(_split(parts_CBSX, shapes), shapes, strict=True)
            )
            resize_away(sent_BSX)
            resize_away(parts_CBSX)
            return gathered

        return Pending(finish)

    @torch.no_grad()
    def start_sum(self, grads: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        shapes = [x.shape[2:] for x in grads]
        grad_BTX = torch.cat([grad.flatten(2) for grad in grads], dim=-1)
        sent_C2BHX = by_rank(grad_BTX, self.size)
        received_C2BHX = torch.empty_like(sent_C2BHX)
        with record_function(EXCHANGE):
            work = dist.all_to_all_single(
                received_C2BHX, sent_C2BHX, group=self.group, async_op=True
            )

        def finish() -> tuple[Tensor, ...]:
            with profiled("context"):
                work.wait()
            record_use(sent_C2BHX, received_C2BHX)
            total_2BHX = sum_of_ranks(received_C2BHX)
            resize_away(sent_C2BHX)
            resize_away(received_C2BHX)
            total_BSX = total_2BHX.transpose(0, 1).flatten(1, 2)
            return tuple(
                part.reshape(*part.shape[:2], *shape)
                for part, shape in zip(_split(total_BSX, shapes), shapes, strict=True)
            )

        return Pending(finish)

    def add_up(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


def _split(x: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """Return the elements of each tensor of these shapes from those of all, the last dim of x."""
    return x.split([shape.numel() for shape in shapes], dim=-1)


def sum_of_ranks(parts_Cx: Tensor) -> Tensor:
    """Return the sum over the first dim, in fp32 or wider, from the first to the last."""
    if is_gpu(parts_Cx):
        rows_NX = parts_Cx.flatten(0, -2)
        row_CM = torch.arange(len(rows_NX), device=rows_NX.device).view(len(parts_Cx), -1)
        return combine_forward(rows_NX, row_CM.T).view(parts_Cx.shape[1:])
    first_x, *others = parts_Cx.unbind()
    total_x = first_x.to(wide_dtype(first_x))
    for part_x in others:
        total_x = total_x + part_x
    return total_x.to(parts_Cx.dtype)


def in_order(parts_CBSX: Float[Tensor, "c b s x"]) -> Float[Tensor, "b t x"]:
    """Return the positions of all ranks in the order of the sequence."""
    first_CBHX, last_CBHX = parts_CBSX.chunk(2, dim=2)
    return torch.cat([*first_CBHX, *reversed(last_CBHX.unbind())], dim=1)


def by_rank(x_BTX: Float[Tensor, "b t x"], num_ranks: int) -> Float[Tensor, "c 2 b h x"]:
    """Return the two slices of each rank."""
    slices = x_BTX.chunk(2 * num_ranks, dim=1)
    pairs = [(slices[rank], slices[-1 - rank]) for rank in range(num_ranks)]
    return torch.cat([x for pair in pairs for x in pair]).view(
        num_ranks, 2, -1, *slices[0].shape[1:]
    )
