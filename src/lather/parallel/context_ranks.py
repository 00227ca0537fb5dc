"""The exchange between context ranks: an all-gather in the forward pass, and in the backward pass
an all-to-all whose parts are summed in a fixed order.

A reduce-scatter would send as many bytes, but sum in an order that depends on the ranks' places in
a ring, and in the dtype of the gradients. Here the sum over the ranks is in fp32 (fp64 for fp64),
rank 0 first, rounded once.

Letters: C context ranks, B sequences, S positions of a rank, T = C * S positions, X elements of all
tensors at a position, N elements of all tensors of a rank, H = S / 2 positions of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lather.kernels.sum_in_order import sum_in_order
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
            of_tensors = in_order(parts_CBSX).split([shape.numel() for shape in shapes], dim=-1)
            resize_away(sent_BSX)
            resize_away(parts_CBSX)
            return tuple(
                x.view(*x.shape[:2], *shape) for x, shape in zip(of_tensors, shapes, strict=True)
            )

        return Pending(finish)

    @torch.no_grad()
    def start_sum(self, grads: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        shapes = [torch.Size((len(x), x.shape[1] // self.size, *x.shape[2:])) for x in grads]
        sent_CN = by_rank(grads, self.size)
        received_CN = torch.empty_like(sent_CN)
        with record_function(EXCHANGE):
            work = dist.all_to_all_single(received_CN, sent_CN, group=self.group, async_op=True)

        def finish() -> tuple[Tensor, ...]:
            with profiled("context"):
                work.wait()
            record_use(sent_CN, received_CN)
            total_N = sum_in_order(received_CN)
            resize_away(sent_CN)
            resize_away(received_CN)
            parts = total_N.split([shape.numel() for shape in shapes])
            return tuple(x.view(shape) for x, shape in zip(parts, shapes, strict=True))

        return Pending(finish)

    def add_up(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


def in_order(parts_CBSX: Float[Tensor, "c b s x"]) -> Float[Tensor, "b t x"]:
    """Return the positions of all ranks in the order of the sequence."""
    first_CBHX, last_CBHX = parts_CBSX.chunk(2, dim=2)
    return torch.cat([*first_CBHX, *reversed(last_CBHX.unbind())], dim=1)


def by_rank(tensors: Sequence[Tensor], num_ranks: int) -> Float[Tensor, "c n"]:
    """Return the elements of tensors (B, T, ...) that belong to each rank's slices: a row has its
    part of each tensor, (B, S, ...), one after the other. One call copies all slices."""
    if not len(tensors[0]):
        return tensors[0].new_empty(num_ranks, 0)
    num_slices = 2 * num_ranks
    slices = [x.reshape(len(x) * num_slices, -1).unbind() for x in tensors]
    pieces = []
    for rank in range(num_ranks):
        for of_tensor in slices:
            for first in range(0, len(of_tensor), num_slices):
                pieces += [of_tensor[first + rank], of_tensor[first + num_slices - 1 - rank]]
    return torch.cat(pieces).view(num_ranks, -1)
