"""The bytes that a pipeline keeps of one chunk, a micro-batch in a stage, layer by layer: counted in one process, with the engine's own
segments.

    kept      from the chunk's forward to its backward: the layer's input among it, and whatever autograd and the engine hold
    waiting   from its I action to its W action: what weight gradients that are put off will need

Layers of one kind keep the same, so one of each is run. Under expert parallelism the other ranks are not there: each is taken to send here
what is sent to it, so that this rank's experts get as many pairs of token and expert as with one rank, which is an even load.

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
from lather.models.moe import LOCAL_EXCHANGE, Arrived, Pending
from lather.models.routing import Routing
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.parallel.exchange_plan import Way, plan_rows
from lather.parallel.expert_exchange import ExpertExchange, GiveBack
from lather.pipeline import overlap
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import ChunkTape, MicroBatch, Segments
from lather.pipeline.tape import Frees


@dataclass(frozen=True)
class MemoryLevers:
    """Settings that save memory."""

    memory: str = "saved"
    """Memory mode of the layers, see `MoEConfig`."""
    recompute: tuple[str, ...] = ()
    """Segments that are run again in backward."""
    early_frees: bool = True


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes that a layer, or several, keep of a chunk."""

    kept: int = 0
    waiting: int = 0

    def __add__(self, other: ChunkBytes) -> ChunkBytes:
        return ChunkBytes(self.kept + other.kept, self.waiting + other.waiting)


@dataclass(frozen=True)
class ModelChunks:
    """Bytes that all layers of a model keep of one micro-batch."""

    layers: tuple[ChunkBytes, ...]
    head: ChunkBytes
    """Final norm, head and loss. The embedding keeps its tokens alone, which are the batch's."""
    boundary: int
    """Bytes of what a stage gives to the next, an activation or its gradient."""
    travels: int | None = None
    """Bytes of the same on its way to another rank; None: as many."""
    tables: int = 0
    """Masks and rotary tables of a chunk; 0 where all micro-batches share them."""

    def of_stages(self, stages: Sequence[range]) -> list[ChunkBytes]:
        """Bytes of a chunk in each stage, given the layers of all stages in order."""
        sums = [sum((self.layers[layer] for layer in layers), ChunkBytes(self.tables)) for layers in stages]
        sums[-1] += self.head
        return sums


@dataclass(frozen=True)
class ChunkMeter:
    """Runs layers as the engine does and counts."""

    model: Decoder
    """With a layer of each kind at least; its weights' gradients are not kept."""
    layer_at: Sequence[int]
    """For each layer of the whole model the index in `model.layers` of one that keeps the same."""
    micro_batch: MicroBatch
    expert_ranks: int = 1
    autocast: torch.dtype | None = None
    _queue: WeightGradients = field(default_factory=WeightGradients, init=False)

    def measure(self, levers: MemoryLevers) -> ModelChunks:
        """Leaves the model with the memory mode of `levers`, and with weight gradients at once."""
        num_experts = len(self.model.routers()[0].weight) if self.model.routers() else 0
        frees = Frees(enabled=levers.early_frees)
        segments = Segments(
            LOCAL_EXCHANGE if self.expert_ranks == 1 else _Mirror(num_experts, self.expert_ranks, frees.give_back),
            weight_gradients=self._queue,
            frees=frees,
            recompute=levers.recompute,
            autocast=self.autocast,
        )
        self.model.set_memory(levers.memory)
        defer_weight_gradients(self.model, self._queue)
        backward = levers.memory != "reference"  # there nothing waits, and gradients of stacks of experts take memory
        try:
            tables = self._tables(segments)
            found = {at: self._chunk(self._stage(at), segments, backward=backward) for at in sorted(set(self.layer_at))}
            head = self._chunk(Stage(1, (), None, self.model.norm, self.model.lm_head), segments, backward=backward)
        finally:
            defer_weight_gradients(self.model, None)
        hidden = self._hidden()
        travels = hidden.nbytes if self.autocast is None else hidden.to(self.autocast).nbytes
        return ModelChunks(tuple(found[at] for at in self.layer_at), head, hidden.nbytes, travels, tables)

    def _stage(self, at: int) -> Stage:
        block = self.model.layers[at]
        assert isinstance(block, Block)
        return Stage(1, (block,))

    def _tables(self, segments: Segments) -> int:
        """Makes what layers leave in the micro-batch's layout, for themselves and others."""
        with PeakBytes() as alive:
            for at in sorted(set(self.layer_at)):
                overlap.run(segments.forward(self._stage(at), self._hidden(), ChunkTape(self.micro_batch), []))
                gc.collect()  # without a backward pass, parts of a graph that refer to each other stay
            return 0 if self.micro_batch.layout.documents is None else alive.now

    def _chunk(self, stage: Stage, segments: Segments, *, backward: bool) -> ChunkBytes:
        tape = ChunkTape(self.micro_batch)
        waiting = 0
        if self.micro_batch.layout.documents is not None:  # the last backward dropped the tables, which are counted by themselves
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
        """An input as the stage before would make it; the numbers are the same each time."""
        weight_VD = self.model.embed_tokens.weight
        generator = torch.Generator().manual_seed(0)
        shape = (*self.micro_batch.tokens_BS.shape, weight_VD.shape[1])
        return torch.randn(shape, generator=generator).to(weight_VD)


class _Mirror(ExpertExchange):
    """Between ranks that are not there. What is sent comes back: rows for another rank's experts as rows for the experts here."""

    def __init__(self, num_experts: int, num_ranks: int, give_back: GiveBack) -> None:
        assert num_experts % num_ranks == 0
        self.num_experts, self.num_ranks = num_experts, num_ranks
        self.num_local_experts = num_experts // num_ranks
        self.give_back = give_back

    @torch.no_grad()
    def start_plan(self, routing: Routing) -> Pending[Way]:
        plan = plan_rows(routing.experts_TK, self.num_local_experts, self.num_ranks)
        sizes_P2 = plan.sizes_P2.tolist()
        return Arrived(plan.way(tuple(rows for rows, _ in sizes_P2), sizes_P2))

    def _launch(self, rows: Tensor, sent_P: tuple[int, ...], received_P: tuple[int, ...], *, own: bool) -> Pending[Tensor]:
        received = rows.clone()
        if own:
            self.give_back(rows)
        return Arrived(received)


def layer_places(model: Decoder, cut: SampledBlocks | None) -> list[int]:
    """`ChunkMeter.layer_at` of a whole model, or of what `cut` left of one."""
    if cut is None:
        at = {layer: kind[0] for kind in block_kinds(model.layers) for layer in kind}
    else:
        at = {layer: place for place, layer in enumerate(cut.kept)}
        at |= {layer: at[second] for second, others in cut.stands_for.items() for layer in (cut.first_of[second], *others)}
    return [at[layer] for layer in sorted(at)]
