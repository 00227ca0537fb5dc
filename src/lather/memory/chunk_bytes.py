"""Measures the bytes that a pipeline keeps for a chunk, a micro-batch in a stage, layer by layer,
in one process with the engine's segments.

    kept      between the chunk's forward and its backward: the layer's input and all tensors that
              autograd and the engine hold
    waiting   between its I action and its W action: tensors that the deferred weight gradients need

Layers of one kind keep the same bytes, so one of each is run. Under expert parallelism the other
ranks do not exist: each is assumed to send what it receives from this rank, so this rank's experts
get as many pairs of token and expert as with one rank, which is an even load.

Letters: B sequences of the micro-batch, S positions, D hidden size.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lather.memory.block_samples import SampledBlocks, block_kinds
from lather.memory.live_bytes import PeakBytes
from lather.models.decoder import Block, Decoder
from lather.models.moe import LOCAL_EXCHANGE, Pending
from lather.models.routing import Routing
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.parallel.exchange_plan import Way, plan_routing
from lather.parallel.expert_exchange import ExpertExchange, FreeBuffer
from lather.pipeline import overlap
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import ChunkTape, MicroBatch, Segments
from lather.pipeline.tape import Frees


@dataclass(frozen=True)
class MemoryLevers:
    """Settings that save memory."""

    memory: str = "saved"
    """Memory mode of the MoE layers, see `MoEConfig`."""
    recompute: tuple[str, ...] = ()
    """Segments that are recomputed in backward."""
    early_frees: bool = True


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes that one or more layers keep for a chunk."""

    kept: int = 0
    waiting: int = 0

    def __add__(self, other: ChunkBytes) -> ChunkBytes:
        return ChunkBytes(self.kept + other.kept, self.waiting + other.waiting)


@dataclass(frozen=True)
class ModelChunks:
    """Bytes that all layers of a model keep for one micro-batch."""

    layers: tuple[ChunkBytes, ...]
    head: ChunkBytes
    """Final norm, head and loss. The embedding keeps only its tokens, which belong to the batch."""
    boundary: int
    """Bytes of the activation that a stage passes to the next, or of its gradient."""
    travels: int
    """The same bytes in the dtype in which it is sent to another rank."""
    tables: int = 0
    """Masks and rotary tables of a chunk; 0 if all micro-batches share them."""

    def of_stages(self, stages: Sequence[range]) -> list[ChunkBytes]:
        """Return the bytes of a chunk in each stage, given the layers of all stages in order."""
        sums = [
            sum((self.layers[layer] for layer in layers), ChunkBytes(self.tables))
            for layers in stages
        ]
        sums[-1] += self.head
        return sums


@dataclass(frozen=True)
class ChunkMeter:
    """Runs layers as the engine does and counts their bytes."""

    model: Decoder
    """A model with at least one layer of each kind; gradients of its weights are discarded."""
    layer_at: Sequence[int]
    """For each layer of the whole model, the index in `model.layers` of a layer of the same
    kind."""
    micro_batch: MicroBatch
    expert_ranks: int = 1
    autocast: torch.dtype | None = None
    _queue: WeightGradients = field(default_factory=WeightGradients, init=False)

    def measure(self, levers: MemoryLevers) -> ModelChunks:
        """Count the bytes with these levers. Afterwards the model has the memory mode of `levers`,
        and weight gradients are not deferred."""
        num_experts = len(self.model.routers()[0].weight) if self.model.routers() else 0
        frees = Frees(enabled=levers.early_frees)
        segments = Segments(
            LOCAL_EXCHANGE
            if self.expert_ranks == 1
            else _Mirror(num_experts, self.expert_ranks, frees.free_buffer),
            weight_gradients=self._queue,
            frees=frees,
            recompute=levers.recompute,
            autocast=self.autocast,
        )
        self.model.set_memory(levers.memory)
        defer_weight_gradients(self.model, self._queue)
        backward = (
            levers.memory != "reference"
        )  # which defers nothing, and whose gradients of expert stacks take memory
        try:
            tables = self._tables(segments)
            found = {
                at: self._chunk(self._stage(at), segments, backward=backward)
                for at in sorted(set(self.layer_at))
            }
            head = self._chunk(
                Stage(1, (), None, self.model.norm, self.model.lm_head), segments, backward=backward
            )
        finally:
            defer_weight_gradients(self.model, None)
        hidden = self._hidden()
        travels = hidden.nbytes if self.autocast is None else hidden.to(self.autocast).nbytes
        return ModelChunks(
            tuple(found[at] for at in self.layer_at), head, hidden.nbytes, travels, tables
        )

    def _stage(self, at: int) -> Stage:
        block = self.model.layers[at]
        assert isinstance(block, Block)
        return Stage(1, (block,))

    def _tables(self, segments: Segments) -> int:
        """Create the tables that layers store in the micro-batch's layout for all layers; return
        their bytes."""
        with PeakBytes() as alive:
            for at in sorted(set(self.layer_at)):
                overlap.run(
                    segments.forward(
                        self._stage(at), self._hidden(), ChunkTape(self.micro_batch), []
                    )
                )
                gc.collect()  # frees reference cycles in a graph without a backward pass
            return 0 if self.micro_batch.layout.documents is None else alive.now

    def _chunk(self, stage: Stage, segments: Segments, *, backward: bool) -> ChunkBytes:
        tape = ChunkTape(self.micro_batch)
        waiting = 0
        if (
            self.micro_batch.layout.documents is not None
        ):  # recreate the tables, which the last backward freed: they count separately
            overlap.run(segments.forward(stage, self._hidden(), ChunkTape(self.micro_batch), []))
        with PeakBytes() as alive:
            out = overlap.run(segments.forward(stage, self._hidden(), tape, []))
            kept = alive.now - out.untyped_storage().nbytes()
            if backward:
                gradient = None if stage.lm_head is not None else torch.ones_like(out)
                del out
                overlap.run(segments.backward(tape, gradient, defer=True))
                del gradient
                entries = self._queue.take()
                for p in self.model.parameters():
                    p.grad = None
                waiting = alive.now
                del entries
        return ChunkBytes(kept, waiting)

    def _hidden(self) -> Tensor:
        """Return an input as the previous stage would produce it, with the same numbers each
        time."""
        weight_VD = self.model.embed_tokens.weight
        generator = torch.Generator().manual_seed(0)
        shape = (*self.micro_batch.tokens_BS.shape, weight_VD.shape[1])
        return torch.randn(shape, generator=generator).to(weight_VD)


class _Mirror(ExpertExchange):
    """An exchange with ranks that do not exist. Sent rows come back: rows for experts of another
    rank become rows for the experts here."""

    def __init__(self, num_experts: int, num_ranks: int, free_buffer: FreeBuffer) -> None:
        assert num_experts % num_ranks == 0
        self.num_experts, self.num_ranks = num_experts, num_ranks
        self.num_local_experts = num_experts // num_ranks
        self.free_buffer = free_buffer

    @torch.no_grad()
    def start_plan(self, routing: Routing) -> Pending[Way]:
        plan = plan_routing(routing, self.num_local_experts, self.num_ranks)
        sizes_P2 = plan.sizes_P2.tolist()
        return Pending(lambda: plan.way(sizes_P2, sizes_P2))

    def _launch(
        self, rows: Tensor, sent_P: tuple[int, ...], received_P: tuple[int, ...], *, own: bool
    ) -> Pending[Tensor]:
        received = rows.clone()
        if own:
            self.free_buffer(rows)
        return Pending(lambda: received)


def layer_places(model: Decoder, cut: SampledBlocks | None) -> list[int]:
    """Return `ChunkMeter.layer_at` for a whole model, or for one that was reduced to `cut`."""
    if cut is None:
        at = {layer: kind[0] for kind in block_kinds(model.layers) for layer in kind}
    else:
        at = {layer: cut.kept.index(kind[:2][-1]) for kind in cut.kinds for layer in kind}
    return [at[layer] for layer in sorted(at)]
