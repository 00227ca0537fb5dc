"""The exchange of expert parallelism: all-to-alls take tokens to the ranks of their experts, and
the partial sums of each rank back.

Source: GShard (Lepikhin et al., arXiv:2006.16668) for the all-to-all. A token is sent to a rank
once, however many of its experts are there, and one partial sum comes back, as in DeepSeek-V3
between nodes (arXiv:2412.19437, section 3.2.2).

                         sent                             result
    plan                 rows and pairs, (P, 2)           the numbers of rows of all following
                                                          exchanges, on the host
    dispatch             x_TD gathered to (S, D)          x_RD; experts and weights (R, K) in one
                                                          integer buffer beside it
    combine              partial_RD as it is              (S, D), summed per token in fp32, slots in
                                                          order: (T, D)
    combine backward     grad_TD gathered to (S, D)       grad_RD
    dispatch backward    grad_RD, grad_weights_RK         (S, D), summed per token: (T, D); (S, K),
                                                          each slot from its rank: (T, K)

Rows are sent in the dtype in which they are given, in both directions, and summed in fp32 (fp64 for
fp64), slots in order, rounded once.

Between forward and backward only indices are kept (`exchange_plan.Way`); every buffer is freed once
its rows have arrived or been summed.

Every phase is a collective operation; dispatch and its backward are two, one after the other. All
ranks of the group have to launch the same phases in the same order, including ranks without tokens,
or the others wait forever. With the differentiable functions this holds for the backward pass as
well, so the loss has to depend on the result either on every rank or on none.

Letters: T tokens of this rank, R rows that it receives, S rows that it sends, D hidden size, K
experts per token, P ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.device import Read, gpu_module, is_gpu, read
from lather.kernels.combine import combine_forward
from lather.kernels.gather import padded_index_gather
from lather.kernels.route import check_range
from lather.models.moe import Dispatched, Exchange, Pending
from lather.models.routing import Routing
from lather.parallel.exchange_plan import Way, pack_routing, plan_routing, unpack_routing
from lather.shapes import Float

FreeBuffer = Callable[[Tensor], None]
"""Called with a buffer that will not be read again."""


def resize_away(buffer: Tensor) -> None:
    """Free the buffer at once: gloo's threads keep references for some time after a wait."""
    buffer.untyped_storage().resize_(0)


class ExpertExchange(Exchange):
    """The exchange between the P ranks of `group` (None: all ranks): expert e is number e % N on
    rank e // N, where N = num_experts / P. If P is 1, `lather.models.moe.LOCAL_EXCHANGE` does the
    same without copies.

    Any number of layers and micro-batches can be under way, since the exchange keeps no state of
    them. T may differ between ranks and be 0; D, K and dtypes must not differ. `free_buffer` is
    called with each buffer that the exchange allocated. `sizes_group` has the same ranks and its
    own communicator, so that the numbers of rows do not queue behind rows. Raises ValueError if the
    experts cannot be divided evenly.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        *,
        free_buffer: FreeBuffer = resize_away,
        sizes_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.num_experts, self.num_ranks = (
            group,
            num_experts,
            dist.get_world_size(group),
        )
        self.sizes_group, self.free_buffer = (
            group if sizes_group is None else sizes_group,
            free_buffer,
        )
        if num_experts < 1 or num_experts % self.num_ranks:
            raise ValueError(
                f"{num_experts} experts cannot be divided evenly among {self.num_ranks} ranks: use "
                "an expert-parallel size that does"
            )
        self.num_local_experts = num_experts // self.num_ranks
        self._sizes_stream: Any = None

    def dispatch(self, x_TD: Float[Tensor, "t d"], routing: Routing) -> Dispatched:
        """Send tokens to the ranks of their experts; differentiable with respect to tokens and
        weights.

        Weights of experts on other ranks arrive as 0. Only indices are kept. Errors as in
        `start_dispatch`.
        """
        x_RD, weights_RK, experts_RK, way = _Dispatch.apply(x_TD, routing.weights_TK, routing, self)  # type: ignore[no-untyped-call]
        return Dispatched(x_RD, experts_RK, weights_RK, way, way.num_pairs)

    def combine(
        self, partial_RD: Float[Tensor, "r d"], dispatched: Dispatched
    ) -> Float[Tensor, "t d"]:
        """Send partial sums back and sum them per token; differentiable. Only indices are kept.
        Errors as in `start_combine`."""
        return _CombineRanks.apply(partial_RD, dispatched.way, self)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def start_plan(self, routing: Routing) -> Pending[Way]:
        """Start the exchange of the numbers of rows. The host waits for them in the result's
        `wait`, and nowhere else.

        Raises ValueError, before anything is sent, if experts are out of range (on CUDA the device
        asserts this).
        """
        lowest = 0 if routing.num_pairs is None else -1
        check_range(routing.experts_TK, lowest, self.num_experts, "experts_TK")
        plan = plan_routing(routing, self.num_local_experts, self.num_ranks)
        sizes_2P2 = torch.stack([plan.sizes_P2, torch.empty_like(plan.sizes_P2)])
        work = dist.all_to_all_single(
            sizes_2P2[1], plan.sizes_P2, group=self.sizes_group, async_op=True
        )
        arrive: Callable[[], object] = work.wait
        if is_gpu(sizes_2P2):
            # another priority, so that it is none of NCCL's own streams
            if self._sizes_stream is None:
                self._sizes_stream = gpu_module(sizes_2P2).Stream(sizes_2P2.device, priority=-1)
            # the compute stream may have further work queued
            with gpu_module(sizes_2P2).stream(self._sizes_stream):
                work.wait()
                _used_here(plan.sizes_P2, sizes_2P2)
                sizes_2P2 = read(sizes_2P2, Read.SIZES, wait=False)
                arrive = self._sizes_stream.record_event().synchronize

        def finish() -> Way:
            arrive()
            return plan.way(*read(sizes_2P2, Read.SIZES).tolist())

        return Pending(finish)

    @torch.no_grad()
    def start_dispatch(
        self, x_TD: Float[Tensor, "t d"], routing: Routing, plan: Way | None = None
    ) -> Pending[Dispatched]:
        """Start to send tokens. Raises ValueError, before anything is sent, if `routing` has
        another number of tokens, and as `start_plan` does."""
        if not len(x_TD) == len(routing.experts_TK) == len(routing.weights_TK):
            raise ValueError(
                f"{len(x_TD)} tokens, but experts for {len(routing.experts_TK)} and weights for "
                f"{len(routing.weights_TK)}: "
                "give the routing of these tokens"
            )
        way = self.start_plan(routing).wait() if plan is None else plan
        packed_travel = self._launch(
            pack_routing(routing, way, self.num_local_experts), way.sent_P, way.received_P, own=True
        )
        x_travel = self._launch(_rows_to_send(x_TD, way), way.sent_P, way.received_P, own=True)
        dtype = routing.weights_TK.dtype

        def finish() -> Dispatched:
            packed, x_RD = packed_travel.wait(), x_travel.wait()
            experts_RK, weights_RK = unpack_routing(packed, dtype)
            self.free_buffer(packed)
            return Dispatched(x_RD, experts_RK, weights_RK, way, way.num_pairs)

        return Pending(finish)

    @torch.no_grad()
    def start_combine(self, partial_RD: Float[Tensor, "r d"], way: Way) -> Pending[Tensor]:
        """Start to send partial sums back. Raises ValueError, before anything is sent, unless there
        are R of them."""
        travel = self._launch_back(partial_RD, way)
        return Pending(lambda: self._sum_per_token(way, travel.wait()))

    @torch.no_grad()
    def start_combine_backward(self, grad_TD: Float[Tensor, "t d"], way: Way) -> Pending[Tensor]:
        """Start the backward pass of combine. Raises ValueError, before anything is sent, unless
        there are T gradients."""
        _check_rows(grad_TD, len(way.row_TK))
        _used_here(way.token_S)
        return self._launch(_rows_to_send(grad_TD, way), way.sent_P, way.received_P, own=True)

    @torch.no_grad()
    def start_dispatch_backward(
        self, grad_RD: Float[Tensor, "r d"], grad_weights_RK: Float[Tensor, "r k"], way: Way
    ) -> Pending[tuple[Tensor, Tensor]]:
        """Start the backward pass of dispatch. Raises ValueError, before anything is sent, unless
        there are R gradients of either kind."""
        _check_rows(grad_weights_RK, sum(way.received_P))
        grad_travel, weights_travel = (
            self._launch_back(grad_RD, way),
            self._launch_back(grad_weights_RK, way),
        )

        def finish() -> tuple[Tensor, Tensor]:
            grad_SD, grad_weights_SK = grad_travel.wait(), weights_travel.wait()
            grad_TD = self._sum_per_token(way, grad_SD)
            if not len(grad_weights_SK):  # all tokens are padding
                return grad_TD, grad_weights_SK.new_zeros(way.row_TK.shape)
            grad_weights_TK = grad_weights_SK.gather(0, way.row_of_slot())
            self.free_buffer(grad_weights_SK)
            return grad_TD, grad_weights_TK

        return Pending(finish)

    def _sum_per_token(self, way: Way, rows_SD: Tensor) -> Tensor:
        _used_here(way.row_TK)
        sum_TD = combine_forward(rows_SD, way.row_TK)
        self.free_buffer(rows_SD)
        return sum_TD

    def _launch_back(self, rows_RD: Tensor, way: Way) -> Pending[Tensor]:
        _check_rows(rows_RD, sum(way.received_P))
        return self._launch(rows_RD.contiguous(), way.received_P, way.sent_P, own=False)

    def _launch(
        self, rows: Tensor, sent_P: tuple[int, ...], received_P: tuple[int, ...], *, own: bool
    ) -> Pending[Tensor]:
        """Start an all-to-all of rows. `own`: the exchange allocated them, so they are freed when
        they have been sent."""
        received = rows.new_empty(sum(received_P), rows.shape[1])
        work = dist.all_to_all_single(
            received, rows, list(received_P), list(sent_P), group=self.group, async_op=True
        )

        def finish() -> Tensor:
            work.wait()
            _used_here(rows, received)
            if own:
                self.free_buffer(rows)
            return received

        return Pending(finish)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, routing: Routing, exchange: ExpertExchange
    ) -> tuple[Tensor, Tensor, Tensor, Way]:
        dispatched = exchange.start_dispatch(x_TD, routing).wait()
        _keep(ctx, exchange, dispatched.way)
        ctx.mark_non_differentiable(dispatched.experts_RK)
        return dispatched.x_RD, dispatched.weights_RK, dispatched.experts_RK, dispatched.way

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_RD: Tensor, grad_weights_RK: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        grad_TD, grad_weights_TK = ctx.exchange.start_dispatch_backward(
            grad_RD, grad_weights_RK, _kept(ctx)
        ).wait()
        return grad_TD, grad_weights_TK, None, None


class _CombineRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_RD: Tensor, way: Way, exchange: ExpertExchange) -> Tensor:
        _keep(ctx, exchange, way)
        return exchange.start_combine(partial_RD, way).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.start_combine_backward(grad_TD, _kept(ctx)).wait(), None, None


def _keep(ctx: Any, exchange: ExpertExchange, way: Way) -> None:
    """Save the indices with `save_for_backward`, so that saved-tensor hooks see them."""
    ctx.save_for_backward(way.token_S, way.row_TK)
    ctx.exchange, ctx.splits = exchange, (way.sent_P, way.received_P)


def _kept(ctx: Any) -> Way:
    return Way(*ctx.saved_tensors, *ctx.splits)


def _rows_to_send(x_TD: Tensor, way: Way) -> Tensor:
    return padded_index_gather(x_TD, way.token_S, 1, checked=False)


def _check_rows(rows: Tensor, expected: int) -> None:
    if len(rows) != expected:
        raise ValueError(
            f"{len(rows)} rows, but this dispatch had {expected} here: give one row for each of "
            "them, in their order"
        )


def _used_here(*tensors: Tensor) -> None:
    """On CUDA, tell the allocator that the current stream uses these tensors: a launch and its wait
    may be on different streams."""
    for tensor in tensors:
        if is_gpu(tensor):
            tensor.record_stream(gpu_module(tensor.device).current_stream(tensor.device))
