"""The costs of both values of `parallel.gather` for a rank of a pipeline. Those of the run's value
are its step's. For the other, the executor walks the rank's table with passes that compute nothing,
and only need parameters and give gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lather.boxes import gradient_dtype
from lather.config.config import Config, ParallelConfig
from lather.engine.settings import schedule_for
from lather.memory.dry_rank import DryRank
from lather.memory.ledger import MemoryTimeline
from lather.memory.work import Work
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.moe import MoE
from lather.models.saving.weight_gradients import DeferredGradient
from lather.models.token_positions import SequenceLayout
from lather.pipeline.chunk import ChunkTape, MicroBatch
from lather.pipeline.executor import Activation, Executor
from lather.pipeline.gathering import GATHERED, Pass, Units, visited_modules
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import Segments, Steps

_NOTHING = (1, 1, 1)
"""Shape of what travels from stage to stage."""


@dataclass(frozen=True)
class GatheringCost:
    """The cost of a value of `parallel.gather` for a rank."""

    kept: int
    """Most bytes of gathered parameters and gradients at a time."""
    sent: float
    """Bytes of parameters and gradients that the rank sends in a step."""


def gathering_costs(
    dry: DryRank, config: Config, step: MemoryTimeline, work: Mapping[str, Work]
) -> dict[str, GatheringCost]:
    """Return the cost of each value of `parallel.gather`, of which a dry rank has had one in a
    step; nothing without a pipeline, or if there is a single data rank."""
    if config.parallel.pp == 1 or dry.engine.mesh.shard_size == 1:
        return {}
    other: Literal["block", "stage"]
    other = "block" if config.parallel.resolved_gather == "stage" else "stage"
    start = dry.mode.ledger.time
    dry.mode.tally.restart()
    _walk(dry, replace(config.parallel, gather=other))
    walked = _cost(dry.mode.ledger.timeline(start), dry.mode.tally.sums)
    return {config.parallel.resolved_gather: _cost(step, work), other: walked}


def _cost(timeline: MemoryTimeline, work: Mapping[str, Work]) -> GatheringCost:
    kept = timeline.of_kind("gathered parameters") + timeline.of_kind("gradients")
    return GatheringCost(int(kept.max()), sum(each.parameters for each in work.values()))


def _walk(dry: DryRank, parallel: ParallelConfig) -> None:
    """Let the executor walk a table without computing."""
    engine, device = dry.engine, dry.engine.mesh.device
    schedule = schedule_for(parallel, engine.schedule.num_micro_batches)
    num_depths = len(engine.part.mtp_layers)
    passes = _EmptyPasses(
        units=engine.units, num_depths=num_depths, rounded_weights=engine.rounded_weights
    )
    activation = Activation(_NOTHING, torch.float32)
    executor = Executor(
        engine.part.stages, schedule, passes, activation, engine.mesh, engine.units, dry.mode
    )
    tokens_BS = torch.empty(1, 1, dtype=torch.long, device=device)
    depth = MicroBatch(tokens_BS, tokens_BS, SequenceLayout(1, 1, device))
    batch = replace(depth, depths=(depth,) * num_depths)
    executor.run([batch] * schedule.num_micro_batches)
    for unit in engine.units.values():
        unit.wait_for_gradients()
    engine.parameters.clear_gradients()


@dataclass(eq=False)
class _EmptyPasses(Segments):
    """Passes that need the parameters of a stage, and give them gradients, without computing."""

    _: KW_ONLY
    units: Units
    num_depths: int
    _stages: dict[int, Stage] = field(default_factory=dict)
    """The stage of each tape."""

    def forward(
        self,
        stage: Stage,
        x_BSD: Tensor | None,
        tape: ChunkTape,
        routings: list[Any],
        parameters: Pass = GATHERED,
    ) -> Steps[Tensor]:
        self._stages[id(tape)] = stage
        for visited in visited_modules(stage, self.num_depths):
            with parameters.visit():
                yield from _turns(visited, 3)
        return torch.empty(_NOTHING, device=tape.micro_batch.tokens_BS.device)

    def backward(
        self,
        tape: ChunkTape,
        grad_BSD: Tensor | None,
        parameters: Pass = GATHERED,
        *,
        defer: bool = False,
    ) -> Steps[Tensor | None]:
        stage = self._stages.pop(id(tape))
        for visited in reversed(visited_modules(stage, self.num_depths)):
            with parameters.visit():
                yield from _turns(visited, 2)
                self._give_gradients(visited, of_experts=True, defer=defer)
                yield from _turns(visited, 0 if defer else 1)
                self._give_gradients(visited, of_experts=False, defer=defer)
        if stage.index == 0:
            return None
        return torch.empty(_NOTHING, device=tape.micro_batch.tokens_BS.device)

    def _give_gradients(
        self, visited: Sequence[nn.Module], *, of_experts: bool, defer: bool
    ) -> None:
        """Give the parameters of the experts a gradient, or all others; later, if those of blocks
        are deferred. The head has the final norm in its unit."""
        for module in visited:
            owner = module if isinstance(module, Block) else self.units[module].modules
            layers = [layer for layer in owner.modules() if isinstance(layer, Experts)]
            experts = {p for layer in layers for p in layer.parameters()}
            gradients = [
                DeferredGradient(p, partial(torch.empty_like, p, dtype=gradient_dtype(p)))
                for p in owner.parameters()
                if p.requires_grad and (p in experts) == of_experts
            ]
            if defer and isinstance(module, Block):
                self.weight_gradients.entries += gradients
            else:
                self.weight_gradients.run(gradients)


def _turns(visited: Sequence[nn.Module], number: int) -> Steps[None]:
    """Stop where `Segments` stops for the exchanges of a block with experts."""
    block, *others = visited
    if not others and isinstance(block, Block) and isinstance(block.mlp, MoE):
        yield from [None] * number
