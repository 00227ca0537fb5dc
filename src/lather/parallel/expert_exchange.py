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
fp64), slots in order, rounded once. Rows in FP8 are sent as bytes, which become the result without
a copy; their scales, of which each is that of 128 elements, travel in the integer buffer.

Between forward and backward only indices are kept (`exchange_plan.DispatchHandle`); every buffer is
freed once its rows have arrived or been summed.

Every phase is a collective operation; dispatch and its backward are two, one after the other. All
ranks of the group have to start the same phases in the same order, including ranks without tokens,
or the others wait forever. With the differentiable functions this holds for the backward pass as
well, so the loss has to depend on the result either on every rank or on none.

Letters: T tokens of this rank, R rows that it receives, S rows that it sends, D hidden size, K
experts per token, B blocks of scales of a row, P ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.device import Read, gpu_module, is_gpu, read
from lather.kernels.block_scaled import DTYPE, BlockScaled
from lather.kernels.combine import combine_forward
from lather.kernels.exchange_plan import pack_routing, slots_from_sent, unpack_routing
from lather.kernels.gather import gather_rows
from lather.models.moe import Dispatched, Exchange
from lather.models.pending import Pending
from lather.models.routing import Routing
from lather.models.scaled_products import Rows
from lather.parallel.exchange_plan import DispatchHandle, ExchangePlan
from lather.profiled import profiled
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

    Any number of layers and micro-batches can be in progress, since the exchange keeps no state of
    them. T may differ between ranks and be 0; D, K and dtypes must not differ. `free_buffer` is
    called with each buffer that the exchange allocated. `sizes_group` has the same ranks and its
    own communicator, so that the numbers of rows do not queue behind rows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        *,
        free_buffer: FreeBuffer = resize_away,
        sizes_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.sizes_group = group, group if sizes_group is None else sizes_group
        self.num_experts, self.num_ranks = num_experts, dist.get_world_size(group)
        self.free_buffer = free_buffer
        assert num_experts % self.num_ranks == 0, (num_experts, self.num_ranks)
        self.num_local_experts = num_experts // self.num_ranks
        self._sizes_stream: Any = None

    def dispatch(self, x_TD: Float[Tensor, "t d"], routing: Routing) -> Dispatched:
        """Send tokens to the ranks of their experts; differentiable with respect to tokens and
        weights.

        Weights of experts on other ranks arrive as 0. Only indices are kept. Errors as in
        `start_dispatch`.
        """
        x_RD, weights_RK, experts_RK, handle = _Dispatch.apply(  # type: ignore[no-untyped-call]
            x_TD, routing.weights_TK, routing, self
        )
        return Dispatched(x_RD, experts_RK, weights_RK, handle, handle.num_pairs)

    def combine(
        self, partial_RD: Float[Tensor, "r d"], dispatched: Dispatched
    ) -> Float[Tensor, "t d"]:
        """Send partial sums back and sum them per token; differentiable. Only indices are kept.
        Errors as in `start_combine`."""
        return _CombineRanks.apply(partial_RD, dispatched.handle, self)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    @profiled("exchange.plan")
    def start_plan(self, routing: Routing) -> Pending[DispatchHandle]:
        """Start the exchange of the numbers of rows. The host waits for them in the result's
        `wait`, and nowhere else.

        Raises ValueError, before anything is sent, if experts are out of range (on CUDA the device
        asserts this).
        """
        plan = ExchangePlan.of_routing(routing, self.num_local_experts, self.num_ranks)
        sizes_2P2 = plan.sizes_2P2
        work = dist.all_to_all_single(
            sizes_2P2[1], sizes_2P2[0], group=self.sizes_group, async_op=True
        )
        arrive: Callable[[], object] = work.wait
        if is_gpu(sizes_2P2):
            # another priority, so that it is none of NCCL's own streams
            if self._sizes_stream is None:
                self._sizes_stream = gpu_module(sizes_2P2).Stream(sizes_2P2.device, priority=-1)
            # the compute stream may have further work queued
            with gpu_module(sizes_2P2).stream(self._sizes_stream):
                work.wait()
                record_use(sizes_2P2)
                sizes_2P2 = read(sizes_2P2, Read.SIZES, wait=False)
                arrive = self._sizes_stream.record_event().synchronize

        def finish() -> DispatchHandle:
            with profiled("exchange.plan"):
                arrive()
            return plan.handle(*read(sizes_2P2, Read.SIZES).tolist())

        return Pending(finish)

    @torch.no_grad()
    @profiled("exchange.dispatch")
    def start_dispatch(
        self, x_TD: Rows, routing: Routing, plan: DispatchHandle | None = None
    ) -> Pending[Dispatched]:
        """Start to send tokens. Raises ValueError, before anything is sent, if `routing` has
        another number of tokens, and as `start_plan` does."""
        scales_TB = None
        if isinstance(x_TD, BlockScaled):
            scales_TB = x_TD.scales
            x_TD = x_TD.values.view(torch.uint8)
        if not len(x_TD) == len(routing.experts_TK) == len(routing.weights_TK):
            raise ValueError(
                f"{len(x_TD)} tokens, but experts for {len(routing.experts_TK)} and weights for "
                f"{len(routing.weights_TK)}: "
                "give the routing of these tokens"
            )
        handle = self.start_plan(routing).wait() if plan is None else plan
        record_use(handle.token_S, handle.row_TK)
        packed = pack_routing(
            routing.experts_TK,
            routing.weights_TK,
            handle.token_S,
            handle.row_TK,
            self.num_local_experts,
        )
        numbers, dtype = packed.shape[1], routing.weights_TK.dtype
        if scales_TB is not None:
            bits_SB = gather_rows(scales_TB, handle.token_S).view(torch.int32)
            packed = torch.cat([packed, bits_SB.to(packed.dtype)], dim=1)
        packed_arriving = self._send(packed, handle)
        x_arriving = self._send(gather_rows(x_TD, handle.token_S), handle)
        is_fp8 = scales_TB is not None

        def finish() -> Dispatched:
            packed, x_RD = packed_arriving.wait(), x_arriving.wait()
            rows: Rows = x_RD
            with profiled("exchange.dispatch"):
                experts_RK, weights_RK = unpack_routing(packed[:, :numbers], dtype)
                if is_fp8:
                    rows = BlockScaled(x_RD.view(DTYPE), _scales_of(packed[:, numbers:]))
            self.free_buffer(packed)
            return Dispatched(rows, experts_RK, weights_RK, handle, handle.num_pairs)

        return Pending(finish)

    @torch.no_grad()
    @profiled("exchange.combine")
    def start_combine(
        self, partial_RD: Float[Tensor, "r d"], handle: DispatchHandle
    ) -> Pending[Tensor]:
        """Start to send partial sums back. Raises ValueError, before anything is sent, unless there
        are R of them."""
        arriving = self._send_back(partial_RD, handle)
        return Pending(lambda: self._sum_per_token(handle, arriving.wait()))

    @torch.no_grad()
    @profiled("exchange.combine_backward")
    def start_combine_backward(
        self, grad_TD: Float[Tensor, "t d"], handle: DispatchHandle
    ) -> Pending[Tensor]:
        """Start the backward pass of combine. Raises ValueError, before anything is sent, unless
        there are T gradients."""
        _check_rows(grad_TD, len(handle.row_TK))
        record_use(handle.token_S)
        return self._send(gather_rows(grad_TD, handle.token_S), handle)

    @torch.no_grad()
    @profiled("exchange.dispatch_backward")
    def start_dispatch_backward(
        self,
        grad_RD: Float[Tensor, "r d"],
        grad_weights_RK: Float[Tensor, "r k"],
        handle: DispatchHandle,
    ) -> Pending[tuple[Tensor, Tensor]]:
        """Start the backward pass of dispatch. Raises ValueError, before anything is sent, unless
        there are R gradients of either kind."""
        _check_rows(grad_weights_RK, sum(handle.received_P))
        grad_arriving = self._send_back(grad_RD, handle)
        weights_arriving = self._send_back(grad_weights_RK, handle)

        def finish() -> tuple[Tensor, Tensor]:
            grad_SD, grad_weights_SK = grad_arriving.wait(), weights_arriving.wait()
            grad_TD = self._sum_per_token(handle, grad_SD)
            grad_weights_TK = slots_from_sent(grad_weights_SK, handle.row_TK)
            self.free_buffer(grad_weights_SK)
            return grad_TD, grad_weights_TK

        return Pending(finish)

    @profiled("exchange.sum")
    def _sum_per_token(self, handle: DispatchHandle, rows_SD: Tensor) -> Tensor:
        record_use(handle.row_TK)
        sum_TD = combine_forward(rows_SD, handle.row_TK)
        self.free_buffer(rows_SD)
        return sum_TD

    def _send(self, rows_SD: Tensor, handle: DispatchHandle) -> Pending[Tensor]:
        """Start to send rows to the ranks of their experts; `rows_SD` is freed when they have been
        sent."""
        return self._all_to_all(rows_SD, handle.sent_P, handle.received_P, free=True)

    def _send_back(self, rows_RD: Tensor, handle: DispatchHandle) -> Pending[Tensor]:
        """Start to send rows back to the ranks of their tokens."""
        _check_rows(rows_RD, sum(handle.received_P))
        return self._all_to_all(rows_RD.contiguous(), handle.received_P, handle.sent_P, free=False)

    def _all_to_all(
        self, rows: Tensor, sent_P: tuple[int, ...], received_P: tuple[int, ...], *, free: bool
    ) -> Pending[Tensor]:
        received = rows.new_empty(sum(received_P), rows.shape[1])
        work = dist.all_to_all_single(
            received, rows, list(received_P), list(sent_P), group=self.group, async_op=True
        )

        def finish() -> Tensor:
            with profiled("exchange.wait"):
                work.wait()
            record_use(rows, received)
            if free:
                self.free_buffer(rows)
            return received

        return Pending(finish)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, routing: Routing, exchange: ExpertExchange
    ) -> tuple[Any, ...]:
        dispatched = exchange.start_dispatch(x_TD, routing).wait()
        _save_handle(ctx, exchange, dispatched.handle)
        ctx.mark_non_differentiable(dispatched.experts_RK)
        return dispatched.x_RD, dispatched.weights_RK, dispatched.experts_RK, dispatched.handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_RD: Tensor, grad_weights_RK: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        grad_TD, grad_weights_TK = ctx.exchange.start_dispatch_backward(
            grad_RD, grad_weights_RK, _saved_handle(ctx)
        ).wait()
        return grad_TD, grad_weights_TK, None, None


class _CombineRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, partial_RD: Tensor, handle: DispatchHandle, exchange: ExpertExchange
    ) -> Tensor:
        _save_handle(ctx, exchange, handle)
        return exchange.start_combine(partial_RD, handle).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.start_combine_backward(grad_TD, _saved_handle(ctx)).wait(), None, None


def _save_handle(ctx: Any, exchange: ExpertExchange, handle: DispatchHandle) -> None:
    """Save the indices with `save_for_backward`, so that saved-tensor hooks see them."""
    ctx.save_for_backward(handle.token_S, handle.row_TK)
    ctx.exchange, ctx.splits = exchange, (handle.sent_P, handle.received_P)


def _saved_handle(ctx: Any) -> DispatchHandle:
    return DispatchHandle(*ctx.saved_tensors, *ctx.splits)


def _scales_of(bits_RB: Tensor) -> Tensor:
    """Return the scales with these bits, as a copy."""
    bits_RB = bits_RB.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
    return bits_RB.view(torch.float32)


def _check_rows(rows: Tensor, expected: int) -> None:
    if len(rows) != expected:
        raise ValueError(
            f"{len(rows)} rows, but this dispatch had {expected} here: give one row for each of "
            "them, in their order"
        )


def record_use(*tensors: Tensor) -> None:
    """On CUDA, tell the allocator that the current stream uses these tensors: a launch and its wait
    may be on different streams."""
    for tensor in tensors:
        if is_gpu(tensor):
            tensor.record_stream(gpu_module(tensor.device).current_stream(tensor.device))
