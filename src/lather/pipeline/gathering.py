"""Gathers the parameters of a stage block by block: just before a block computes, and at most one
block ahead. Consecutive blocks that are small are gathered as one unit (`SMALL`).

    forward     gather the next block | compute | free
    backward    gather the previous block | compute | sum the gradients over data ranks | free

A block is gathered again for its backward pass, which reads its weights and may have to make
activations again. Weight gradients that are deferred need no weights; their block's gradients are
summed when they have been computed. At its last block a pass gathers what the next pass begins
with. That is often the same: the head after a forward pass, and the embedding after a backward
pass, stay gathered. So a rank has the parameters of two units besides its shards, and four inside
an overlapped pair; each is one more where a part of multi-token prediction needs two units.

Gathers and sums start in the order in which a rank's code comes to them, and this order depends on
the table and the model, not on time, routing or sizes. So all data ranks of a pipeline rank, which
run the same row on the same stages, start the same operations in the same order, and each waits
only for operations that it has started. The first operation that is not complete has therefore been
started, or will be, by all of its ranks, and none of them waits for a later one: data ranks do not
wait for each other in a circle. For the other stages they are as one rank, so a table that does not
deadlock without gathers (`lather.pipeline.replay`) does not deadlock with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from lather.models.saving.rounded_weights import RoundedWeights
from lather.parallel.fsdp_units import FsdpUnit, shard
from lather.parallel.mesh import Mesh
from lather.parallel.sharded_parameters import Storing
from lather.pipeline.model_part import ModelPart, Stage, allocate
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import Action, Kind
from lather.profiled import profiled

Units = Mapping[nn.Module, FsdpUnit]
"""Units by the modules that a pass visits: each block, the embedding and the head."""

Visit = Sequence[FsdpUnit]
"""The units that a part of a pass needs."""

SMALL = 2**24
"""Bytes of parameters, as they are stored, from which on a unit takes no further block; the last of
a stage may have fewer. Each gather takes time to start, and these bytes take 0.3 ms at 50 GB/s."""


def shard_part(
    part: ModelPart,
    mesh: Mesh,
    storing: Storing = Storing(),  # noqa: B008
) -> dict[nn.Module, FsdpUnit]:
    """Shard the parameters of a part in place, and return its units: each block, or several that
    are small, the embedding, and the head with the final norm. Embedding and head are one unit if
    they are tied.

    Parameters on the meta device get uninitialized memory on `mesh.device`, a unit after the
    other."""
    embedding, norm, head = part.embed_tokens, part.norm, part.lm_head
    groups = [group for stage in part.stages for group in _groups_of_blocks(stage)]
    ends = [module for module in (head, norm) if module is not None]
    if embedding is not None and head is not None and head.weight is embedding.weight:
        groups.append([embedding, *ends])
    else:
        groups += [[embedding]] if embedding is not None else []
        groups += [ends] if ends else []
    units = shard(groups, mesh, allocate, storing)
    return {module: unit for group, unit in zip(groups, units, strict=True) for module in group}


def _groups_of_blocks(stage: Stage) -> Iterator[list[nn.Module]]:
    """Yield the blocks of a stage that are gathered together, in order; each block of multi-token
    prediction, which needs another unit beside it, by itself."""
    group: list[nn.Module] = []
    for block in stage.blocks:
        group.append(block)
        if sum(p.nbytes for member in group for p in member.parameters()) >= SMALL:
            yield group
            group = []
    if group:
        yield group
    for block in stage.mtp_blocks:
        yield [block]


def visited_modules(stage: Stage, num_depths: int) -> list[tuple[nn.Module, ...]]:
    """Return the modules that each visit of a forward pass through the stage needs, in order, with
    so many depths of multi-token prediction; a backward pass visits them from last to first."""
    modules: list[tuple[nn.Module, ...]] = [(block,) for block in stage.blocks]
    if stage.embed_tokens is not None:
        modules.insert(0, (stage.embed_tokens,))
    if stage.lm_head is not None:
        modules.append((stage.lm_head,))
        for block in stage.mtp_blocks[:num_depths]:
            assert stage.mtp_embed_tokens is not None
            modules += [(stage.mtp_embed_tokens, block), (block,), (stage.lm_head, block)]
    return modules


PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.OVERLAP})
"""Kinds of actions that need parameters."""

Leave = Callable[[Visit], None]
"""Called with the units that a visit needed and the following one of its pass does not."""


class Pass:
    """The visits of a pass through a stage, or of none if its parameters are gathered already."""

    def __init__(
        self,
        gathering: Gathering | None = None,
        visits: Sequence[Visit] = (),
        then: Visit = (),
        leave: Leave = lambda _: None,
    ) -> None:
        """`then`: what to gather at the last visit, for the next pass."""
        self._gathering, self._leave = gathering, leave
        self._ahead, self._then = deque(visits), then
        self._current: Visit = ()
        if gathering is not None:
            gathering.gather(visits[0])

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Have the units of the next visit, inside the block."""
        if self._gathering is None:
            yield
            return
        units = self._ahead.popleft()
        if units != self._current:
            self._gathering.wait_for(units)
            others = (visit for visit in self._ahead if visit != units)
            self._gathering.gather(next(others, self._then))
            self._current = units
        yield
        following = self._ahead[0] if self._ahead else ()
        if units != following:
            self._gathering.free(units)
            self._leave([unit for unit in units if unit not in following])


GATHERED = Pass()


class Gathering:
    """Gathers, frees and reduces the units of a rank in a step."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        units: Units,
        num_depths: int,
        rounded_weights: RoundedWeights,
        record: Recorder,
        *,
        by_block: bool,
        async_op: bool,
    ) -> None:
        """`by_block`: whether passes gather; if not, the table has actions that do."""
        self._visits = {
            index: [[units[each] for each in visit] for visit in visited_modules(stage, num_depths)]
            for index, stage in stages.items()
        }
        self._stages = {unit: stage for stage in self._visits for unit in self.units_of(stage)}
        """A stage of each unit; a unit may belong to two."""
        self._rounded_weights, self._record = rounded_weights, record
        self._by_block, self._async_op = by_block, async_op
        self._ahead: Visit = ()
        """Units that were gathered ahead for the next action."""

    def begin(self, actions: Iterable[Action]) -> list[tuple[Action, Action | None]]:
        """Gather what the first pass needs first; return each action with the next one that passes
        through a stage."""
        pairs: list[tuple[Action, Action | None]] = []
        following = None
        for action in reversed([*actions]):
            pairs.append((action, following))
            if action.kind in PASSES:
                following = action
        self._ahead = self._first_of(following)
        self.gather(self._ahead)
        return pairs[::-1]

    def passes(
        self, action: Action, following: Action | None, leave: Callable[[Action], Leave]
    ) -> list[Pass]:
        """Start the passes of an action: one, or two of an overlapped pair."""
        if not self._by_block or action.kind not in PASSES:
            return [GATHERED] * 2
        before, self._ahead = self._ahead, self._first_of(following)
        first, *second = action.chunks
        passes = [Pass(self, self._of(first), self._ahead, leave(first))]
        passes += [Pass(self, self._of(chunk), (), leave(chunk)) for chunk in second]
        self.free(before)
        return passes

    def gather(self, units: Visit) -> None:
        for unit in units:
            with profiled("gather"), self._recording(unit, Kind.UNSHARD):
                unit.unshard(async_op=self._async_op)

    def wait_for(self, units: Visit) -> None:
        for unit in units:
            # without a gather there is nothing to wait for, and a wait divides a recorded action
            waiting = self._record.waiting() if unit.gathered else nullcontext()
            with waiting, profiled("wait"):
                unit.wait()

    def free(self, units: Visit) -> None:
        for unit in units:
            with self._recording(unit, Kind.RESHARD):
                unit.reshard()
                if not unit.is_gathered:
                    self._rounded_weights.forget(unit.gathered)

    def reduce(self, units: Visit) -> None:
        for unit in units:
            with profiled("reduce"), self._recording(unit, Kind.REDUCE_GRAD):
                unit.reduce_gradients()

    def units_of(self, stage: int) -> Visit:
        """Return all units of a stage, in the order of a pass."""
        return list(dict.fromkeys(unit for visit in self._visits[stage] for unit in visit))

    def _recording(self, unit: FsdpUnit, kind: Kind) -> AbstractContextManager[Any]:
        return self._record.sharding(Action(self._stages[unit], kind), unit)

    def _of(self, chunk: Action) -> Sequence[Visit]:
        visits = self._visits[chunk.stage]
        return visits if chunk.kind is Kind.FORWARD else visits[::-1]

    def _first_of(self, action: Action | None) -> Visit:
        if action is None or not self._by_block:
            return ()
        return [unit for chunk in action.chunks for unit in self._of(chunk)[0]]
