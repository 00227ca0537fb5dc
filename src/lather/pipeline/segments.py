"""Runs the forward and backward pass of a micro-batch through a stage, segment by segment, as
generators that stop at each communication.

    forward of a block    attend and route | plan ...yield... dispatch ...yield... | experts |
                          combine ...yield... | aggregate
    backward of a block   combine's gradient ...yield... | experts' | dispatch's gradient
                          ...yield... (twice) | attention's and router's

At a `yield` an all-to-all has been started, and the caller may compute something else
(`lather.pipeline.overlap`). Work that needs no communication is done while it runs: shared experts
while tokens travel; the experts' weight gradients while gradients travel, between two stops, so
that the other chunk can start its exchange meanwhile. (If weight gradients are deferred, there is
one stop less.) Context ranks cut the first segment in two (`lather.pipeline.attention_segment`),
with one stop more forward, and one backward: they gather again while the experts' gradients travel,
or in a dense block while the feed-forward layer's are computed.
The mathematics is that of `Block`, whose `forward` is the reference; autograd graphs end at every
segment (`lather.pipeline.tape`).

Kept per MoE block and token: the activations that attention and the norms keep (the normed rows are
recomputed from the residual), the router's scores, gate/up of the experts, and indices; under
expert parallelism also the received rows (D each). The experts' outputs and combined sums are freed
as soon as they are added. Under autocast, rows and their gradients travel in its dtype, to which
the experts would round them anyway; with `train.fp8` rows travel, and are kept, in FP8.

Letters: B sequences, S positions, T = B * S tokens, D hidden size, R tokens at this rank's experts,
K experts per token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from lather.kernels.residual_sum import residual_sum
from lather.models.block import Attended, Block
from lather.models.moe import LOCAL_EXCHANGE, Exchange, MoE
from lather.models.saving.rounded_weights import RoundedWeights
from lather.models.saving.weight_gradients import WeightGradients
from lather.pipeline.attention_segment import AttentionSegment, SplitCut
from lather.pipeline.chunk import BlockTape, ChunkTape, MicroBatch, RoutingSummary
from lather.pipeline.gathering import GATHERED, Pass
from lather.pipeline.model_part import Stage
from lather.pipeline.segment_functions import (
    call,
    combine_embedding,
    embed_tokens,
    head_loss,
    input_of_experts,
    router_loss_gradients,
    run_experts,
)
from lather.pipeline.segment_runner import SegmentRunner
from lather.pipeline.tape import Cut, Frees, Outputs, inside
from lather.profiled import profiled
from lather.shapes import Float

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that stops at each communication, and returns its result at the end."""


@dataclass(eq=False)
class Segments(SegmentRunner):
    """Runs micro-batches through the stages of a rank. Holds settings only, no state of a
    micro-batch."""

    exchange: Exchange = LOCAL_EXCHANGE
    _: KW_ONLY
    frees: Frees = field(default_factory=Frees)
    rounded_weights: RoundedWeights = field(default_factory=RoundedWeights)
    """The store of weights rounded to that dtype that the layers were given, filled while
    `lather.pipeline.executor.Executor` runs."""

    def forward(
        self,
        stage: Stage,
        x_BSD: Float[Tensor, "b s d"] | None,
        tape: ChunkTape,
        routings: list[RoutingSummary],
        parameters: Pass = GATHERED,
    ) -> Steps[Tensor]:
        """Compute the stage's output from its input (None for the first stage, which reads tokens);
        the last stage returns its losses, (1 + depths,).

        A summary of each MoE block is appended to `routings`. Without grad mode nothing is kept."""
        if stage.embed_tokens is not None:
            with parameters.visit(), profiled("segment.embedding"):
                tape.embed, (x_BSD,) = Cut.run(
                    partial(embed_tokens, stage.embed_tokens, tape.micro_batch.tokens_BS), ()
                )
        assert x_BSD is not None
        x_BSD = yield from self._forward_blocks(stage.blocks, x_BSD, tape, routings, parameters)
        if stage.lm_head is not None:
            x_BSD = yield from self._forward_heads(stage, x_BSD, tape, routings, parameters)
        if not torch.is_grad_enabled():
            tape.micro_batch.layout.forget()
        return x_BSD

    def backward(
        self,
        tape: ChunkTape,
        grad_BSD: Float[Tensor, "b s d"] | None,
        parameters: Pass = GATHERED,
        *,
        defer: bool = False,
    ) -> Steps[Tensor | None]:
        """Compute the gradient of the stage's input (None for the first stage) from that of its
        output (None for the last stage, the losses).

        The tape is empty afterwards. With `defer` the weight gradients stay in the queue.
        """
        grad_BSD = yield from self._backward_chunk(tape, grad_BSD, parameters, defer=defer)
        tape.micro_batch.layout.forget()
        return grad_BSD

    def _backward_chunk(
        self, tape: ChunkTape, grad_BSD: Tensor | None, parameters: Pass, *, defer: bool
    ) -> Steps[Tensor | None]:
        while tape.depths:
            grad_BSD = yield from self._backward_chunk(
                tape.depths.pop(), grad_BSD, parameters, defer=defer
            )
        if tape.head is not None:
            head, grad_of_loss = tape.head
            tape.head = None
            with parameters.visit():
                (grad_BSD,) = self._back(head, [grad_of_loss, grad_BSD], defer=defer)
            del head
        while tape.blocks:
            assert grad_BSD is not None
            with parameters.visit():
                grad_BSD = yield from self._backward_block(
                    tape.blocks.pop(), grad_BSD, tape.micro_batch, defer=defer
                )
        if tape.embed is not None:
            with parameters.visit():
                grad_BSD = next(iter(self._back(tape.embed, [grad_BSD], defer=defer)), None)
            tape.embed = None
        tape.held.clear()
        return grad_BSD

    def _forward_blocks(
        self,
        blocks: Sequence[Block],
        x_BSD: Tensor,
        tape: ChunkTape,
        routings: list[RoutingSummary],
        parameters: Pass,
    ) -> Steps[Tensor]:
        for block in blocks:
            with parameters.visit():
                x_BSD, block_tape = yield from self._forward_block(block, x_BSD, tape, routings)
            if torch.is_grad_enabled():
                tape.blocks.append(block_tape)
        return x_BSD

    def _forward_heads(
        self,
        stage: Stage,
        x_BSD: Tensor,
        tape: ChunkTape,
        routings: list[RoutingSummary],
        parameters: Pass,
    ) -> Steps[Tensor]:
        """Run the head, and multi-token prediction with its blocks; return the losses."""
        assert stage.norm is not None
        with parameters.visit():
            loss, state_BSD = self._head(stage.norm, stage, x_BSD, tape)
        losses = [loss]
        for block, batch in zip(stage.mtp_blocks, tape.micro_batch.depths, strict=False):
            assert block.mtp is not None
            assert stage.mtp_embed_tokens is not None
            depth = ChunkTape(batch)
            embed = partial(embed_tokens, stage.mtp_embed_tokens, batch.tokens_BS)
            combine = partial(combine_embedding, embed, block.mtp)
            with parameters.visit():
                depth.embed, (x_BSD,) = self._run("mtp", combine, state_BSD)
            x_BSD = yield from self._forward_blocks((block,), x_BSD, depth, routings, parameters)
            with parameters.visit():
                loss, state_BSD = self._head(block.mtp.norm, stage, x_BSD, depth)
            losses.append(loss)
            tape.depths.append(depth)
        return torch.stack(losses)

    def _head(
        self, norm: nn.Module, stage: Stage, x_BSD: Tensor, tape: ChunkTape
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the head's input, which is the state for the next depth."""
        batch = tape.micro_batch
        assert stage.lm_head is not None
        compute = partial(head_loss, norm, stage.lm_head, batch)
        head, (loss, x_BSD) = self._run("head", compute, x_BSD)
        tape.head = (head, torch.full_like(loss, batch.loss_weight))
        return loss, x_BSD

    def _forward_block(
        self, block: Block, x_BSD: Tensor, tape: ChunkTape, routings: list[RoutingSummary]
    ) -> Steps[tuple[Tensor, BlockTape]]:
        attend, attended = yield from self._attend(block, x_BSD, tape)
        residual_BSD, normed_TD = attended.residual_BSD, attended.normed_TD
        routing = attended.routing
        if not isinstance(block.mlp, MoE) or routing is None:
            experts, (sum_TD,) = self._run(
                "experts", partial(call, block.mlp), normed_TD, reads=attended
            )
            self._was_read(attended, tape, experts)
            return self._aggregate(residual_BSD, sum_TD, None, tape), BlockTape(attend, experts)

        routings.append(RoutingSummary(routing.count_E, routing.balance_loss))
        planning = self.exchange.start_plan(routing)
        yield
        x_TD = self._cast_for_exchange(normed_TD)
        traveling = self.exchange.start_dispatch(
            x_TD if self.exchange.num_ranks == 1 else block.mlp.experts.rounded_input(x_TD),
            routing,
            planning.wait(),
        )
        dtype = x_TD.dtype
        del x_TD
        shared, shared_TD = self._shared(block.mlp, attended)
        yield
        dispatched = traveling.wait()
        x_RD, received = input_of_experts(dispatched.x_RD, dtype)
        compute = partial(
            run_experts, block.mlp, dispatched.experts_RK, dispatched.num_pairs, received
        )
        experts, (partial_RD,) = self._run(
            "experts", compute, x_RD, dispatched.weights_RK, reads=attended
        )
        self._was_read(attended, tape, experts, shared)
        traveling_back = self.exchange.start_combine(partial_RD, dispatched.handle)
        shared_rows = attended.shared_TD is not None
        block_tape = BlockTape(
            attend, experts, shared, routing.losses, shared_rows, dispatched.handle
        )
        del attended, normed_TD, routing, planning, dispatched, x_RD, received, compute
        yield
        sum_TD = traveling_back.wait()
        self.frees.release(partial_RD, sum_TD, held=tape.held)
        return self._aggregate(residual_BSD, sum_TD, shared_TD, tape), block_tape

    def _backward_block(
        self, tape: BlockTape, grad_BSD: Tensor, batch: MicroBatch, *, defer: bool
    ) -> Steps[Tensor]:
        if tape.losses:
            gradients = yield from self._backward_experts(tape, grad_BSD, batch, defer=defer)
        else:
            if isinstance(tape.attend, SplitCut):
                tape.attend.start_again()
            grad_TD = grad_BSD.flatten(0, 1)
            gradients = [grad_BSD, *self._back(tape.experts, [grad_TD], defer=defer)]
            del grad_TD
        del grad_BSD
        if isinstance(tape.attend, SplitCut):
            return (yield from self._backward_attend(tape.attend, gradients, defer=defer))
        (grad_in_BSD,) = self._back(tape.attend, gradients, defer=defer)
        assert grad_in_BSD is not None
        return grad_in_BSD

    def _backward_experts(
        self, tape: BlockTape, grad_BSD: Tensor, batch: MicroBatch, *, defer: bool
    ) -> Steps[list[Tensor | None]]:
        """Run an MoE block backward to the outputs of segment 1; return their gradients."""
        grad_TD = grad_BSD.flatten(0, 1)  # the gradient of each term of a sum is that of the sum
        if self.autocast is not None and tape.shared_rows:
            grad_TD = grad_TD.to(self.autocast)  # once for both, as their outputs are
        traveling = self.exchange.start_combine_backward(
            self._cast_for_exchange(grad_TD), tape.handle
        )
        grad_shared_TD = None
        if tape.shared is not None:
            (grad_shared_TD,) = self._back(tape.shared, [grad_TD], defer=defer)
        yield
        grad_x_RD, grad_weights_RK = self._back(tape.experts, [traveling.wait()], defer=True)
        assert grad_x_RD is not None
        assert grad_weights_RK is not None
        traveling_back = self.exchange.start_dispatch_backward(
            grad_x_RD, grad_weights_RK, tape.handle
        )
        del grad_x_RD, grad_weights_RK
        if isinstance(tape.attend, SplitCut):
            tape.attend.start_again()
        if not defer:
            # dropped if the generator is closed at the yield
            entries = self.weight_gradients.take()
            yield
            WeightGradients.run(entries)
        yield
        grad_normed_TD, grad_weights_TK = traveling_back.wait()
        of_losses = router_loss_gradients(tape.losses, batch)
        if tape.shared_rows:
            return [grad_BSD, grad_normed_TD, grad_shared_TD, grad_weights_TK, *of_losses]
        # may be changed in place: nothing else uses it, and its dtype is wide enough
        if grad_shared_TD is not None:
            grad_normed_TD = grad_shared_TD.add_(grad_normed_TD)
        return [grad_BSD, grad_normed_TD, grad_weights_TK, *of_losses]

    def _attend(
        self, block: Block, x_BSD: Tensor, tape: ChunkTape
    ) -> Steps[tuple[Cut | SplitCut, Attended]]:
        """Run segment 1."""
        segment = AttentionSegment(block, tape.micro_batch.layout)
        if not segment.is_split:
            cut, outputs = self._run("attention", segment.whole, x_BSD, again=segment.second_run)
            return cut, segment.attended(outputs)
        project, projected = self._run(
            "attention", segment.project, x_BSD, again=segment.second_run
        )
        own, shared = segment.split(projected)
        arriving = segment.context.start_gather(shared)
        del projected, shared
        yield
        shared = arriving.wait()
        recomputed = "attention" in self.recompute
        with torch.no_grad() if recomputed else nullcontext():
            attend, outputs = self._run_once("attention", segment.attend, x_BSD, *own, *shared)
        is_kept = recomputed and segment.context.keeps_gathered
        if (recomputed and not is_kept) or segment.given is not None:
            for x_BTx in shared:
                self.frees.release(x_BTx, *outputs, held=tape.held)
        split = SplitCut(
            segment, project, None if recomputed else attend, shared if is_kept else ()
        )
        return split, segment.attended(outputs)

    def _backward_attend(
        self, cut: SplitCut, gradients: list[Tensor | None], *, defer: bool
    ) -> Steps[Tensor]:
        """Compute the gradient of the input of a segment in two parts. The list is emptied, so that
        the gradients do not live until the end."""
        segment = cut.segment

        def run_again(*inputs: Tensor) -> tuple[Cut, Outputs]:
            function = inside(segment.second_run, segment.attend)
            with torch.enable_grad():
                return self._run_once("attention", function, *inputs)

        cut.finish_again(run_again)
        of_inputs = self._back(cut.attend, gradients, defer=True)
        gradients.clear()
        present = [grad for grad in of_inputs if grad is not None]
        assert len(present) == len(of_inputs), "attention depends on all inputs"
        grad_BSD, *of_projected = present
        own, shared = segment.split(tuple(of_projected))
        arriving = segment.context.start_sum(shared)
        del of_inputs, present, of_projected, shared
        weights = segment.weights_of_all if defer else None
        self.weight_gradients.run_those_of(weights)
        yield
        (grad_in_BSD,) = self._back(cut.project, [*own, *arriving.wait()], defer=defer)
        assert grad_in_BSD is not None
        return grad_in_BSD.add_(grad_BSD)

    def _shared(self, moe: MoE, attended: Attended) -> tuple[Cut | None, Tensor | None]:
        if moe.shared_experts is None:
            return None, None
        cut, (shared_TD,) = self._run(
            "shared_experts", partial(call, moe.shared), attended.normed_TD, reads=attended
        )
        return cut, shared_TD

    def _was_read(self, attended: Attended, tape: ChunkTape, *cuts: Cut | None) -> None:
        """Free the normed rows after their last reader, unless a cut keeps them as input of a
        recomputation."""
        if attended.placeholder is not None:
            kept = [x for cut in cuts if cut is not None for x in cut.kept_inputs]
            self.frees.release(attended.normed_TD, *kept, held=tape.held)

    def _cast_for_exchange(self, x: Tensor) -> Tensor:
        """Cast rows that travel to the autocast dtype, which halves the bytes of the exchange and
        of the received rows."""
        if self.autocast is None or self.exchange.num_ranks == 1 or x.dtype == torch.float64:
            return x
        return x.to(self.autocast)

    def _aggregate(
        self, residual_BSD: Tensor, sum_TD: Tensor, shared_TD: Tensor | None, tape: ChunkTape
    ) -> Tensor:
        """Run segment 5: sums, whose backward pass needs no graph."""
        out_BSD = residual_sum(residual_BSD, sum_TD, shared_TD)
        for term in (sum_TD,) if shared_TD is None else (sum_TD, shared_TD):
            self.frees.release(term, out_BSD, held=tape.held)
        return out_BSD
