"""Walks along tables with units that only write down what happens to them: what is gathered when,
and that data ranks do not wait for each other in a circle, whatever their speed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from lather.models.saving.rounded_weights import RoundedWeights
from lather.pipeline import overlap
from lather.pipeline.gathering import Gathering, Pass, Visit
from lather.pipeline.model_part import Stage
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import (
    RECEIVED_AS,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    dualpipev,
    forwards,
    needs,
    sequential,
)

BLOCKS = 3
Program = list[tuple[Any, ...]]


@dataclass(eq=False)
class WrittenUnit:
    """A unit that writes its operations to the program of its rank."""

    name: str
    program: Program
    gathered: tuple[nn.Parameter, ...] = ()
    holding: int = 0
    started: int = 0
    """Number of the last gather in the program."""
    reduced: int = 0
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def is_gathered(self) -> bool:
        return self.holding > 0

    def unshard(self, *, async_op: bool) -> None:
        self.holding += 1
        if self.holding == 1:
            self._start("gather")

    def wait(self) -> None:
        assert self.holding
        self.program.append(("wait", self.started))

    def reshard(self) -> None:
        assert self.holding
        self.holding -= 1

    def reduce_gradients(self) -> None:
        self.reduced += 1
        self._start("reduce")

    def _start(self, kind: str) -> None:
        self.started = sum(step[0] == "start" for step in self.program)
        self.program.append(("start", kind, self.name))


class Walk:
    """A rank's way along its row."""

    def __init__(
        self, schedule: Schedule, rank: int, *, tied: bool, together: bool = False
    ) -> None:
        """`together`: whether the first two blocks of each stage are one unit."""
        self.schedule, self.program, self.most = schedule, Program(), 0
        stages, units = {}, dict[nn.Module, Any]()
        ends = [WrittenUnit("ends", self.program)] * 2 if tied else None
        for index in schedule.stages_of(rank):
            blocks = tuple(nn.Identity() for _ in range(BLOCKS))
            units |= {b: WrittenUnit(f"{index}.{n}", self.program) for n, b in enumerate(blocks)}
            units |= {blocks[1]: units[blocks[0]]} if together else {}
            embed = nn.Embedding(1, 1) if index == 0 else None
            head = nn.Linear(1, 1) if index == schedule.num_stages - 1 else None
            embedding, last = ends or [WrittenUnit(n, self.program) for n in ("embed", "head")]
            units |= ({embed: embedding} if embed else {}) | ({head: last} if head else {})
            norm = head and nn.Identity()
            stages[index] = Stage(index, blocks, embed, norm, head)  # type: ignore[arg-type]
        self.units: list[Any] = list(dict.fromkeys(units.values()))
        rounded, record = RoundedWeights(), Recorder()
        self.gathering = Gathering(stages, units, 0, rounded, record, by_block=True, async_op=True)
        self.deferred: dict[tuple[int, int | None], list[Visit]] = {}
        self.stages = stages
        for action, following in self.gathering.begin(schedule.ranks[rank]):
            self._do(action, following)

    def _do(self, action: Action, following: Action | None) -> None:
        if action.kind in TRANSFERS:
            self.program.append(("transfer", action))
            return
        for chunk in action.chunks:
            for kind, stage in needs(self.schedule, chunk.kind, chunk.stage):
                if kind in TRANSFERS:
                    self.program.append(("need", Action(stage, kind, chunk.micro_batch)))
        if action.kind is Kind.BACKWARD_WEIGHT:
            for units in self.deferred.pop((action.stage, action.micro_batch)):
                self.gathering.reduce(units)
            return
        passes = self.gathering.passes(action, following, self._leave)
        walks = [self._visit(*pair) for pair in zip(action.chunks, passes, strict=False)]
        if len(walks) == 2:
            overlap.run_both(*walks)
        else:
            overlap.run(walks[0])

    def _visit(self, chunk: Action, parameters: Pass) -> Iterator[None]:
        stage = self.stages[chunk.stage]
        ends = (stage.embed_tokens is not None) + (stage.lm_head is not None)
        for _ in range(BLOCKS + ends):
            with parameters.visit():
                self.most = max(self.most, sum(unit.is_gathered for unit in self.units))
                yield

    def _leave(self, chunk: Action) -> Any:
        def later(units: Visit) -> None:
            self.deferred.setdefault((chunk.stage, chunk.micro_batch), []).append(units)

        return {Kind.BACKWARD: self.gathering.reduce, Kind.BACKWARD_INPUT: later}.get(
            chunk.kind, lambda _: None
        )


TABLES = [
    sequential(3),
    forwards(1, 2),
    forwards(4, 5),
    *(dualpipev(p, n) for p in (1, 2, 3, 4) for n in (2 * p, 2 * p + 1, 3 * p + 2)),
    dualpipev(3, 8, early_weight_gradients=True),
]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("table", [table.by_block() for table in TABLES])
def test_units_are_gathered_when_they_are_read_and_summed_after_each_backward(
    table: Schedule, tied: bool, together: bool
) -> None:
    """At most two units are gathered, and four in an overlapped pair, of two to five that a stage
    has; a unit of several blocks once for all of them."""
    for rank in range(table.num_ranks):
        walk = Walk(table, rank, tied=tied, together=together)
        assert not any(unit.is_gathered for unit in walk.units)
        pairs = any(action.kind is Kind.OVERLAP for action in table.ranks[rank])
        assert walk.most <= (4 if pairs else 2)
        for unit in walk.units:
            uses = 2 if unit.name == "ends" else 1
            assert unit.reduced == table.trains * table.num_micro_batches * uses


@pytest.mark.parametrize("seed", range(8))
def test_data_ranks_of_any_speed_reach_the_end(seed: int) -> None:
    """A rank goes on from a wait when all data ranks have started the operation, and from the need
    of a transfer when the sender has come to it."""
    generator = random.Random(seed)
    for table in (table.by_block() for table in TABLES):
        programs = [
            Walk(table, r, tied=bool(seed % 2), together=bool(seed & 2)).program
            for r in range(table.num_ranks)
        ]
        assert is_finished(programs, generator)


def test_other_orders_of_operations_would_be_found() -> None:
    program = Walk(sequential(2).by_block(), 0, tied=False).program
    starts = [at for at, step in enumerate(program) if step[0] == "start"]
    other = [*program]
    # a gather behind the wait for the one that follows it
    other.append(other.pop(starts[2]))
    assert not is_finished([program], random.Random(0), other)


class Race:
    """Three data ranks of each pipeline rank, which execute its program."""

    def __init__(self, programs: list[Program], other: Program | None = None) -> None:
        """`other`: what the last data rank of the first pipeline rank executes instead."""
        self.left = {(r, d): deque(p) for r, p in enumerate(programs) for d in range(3)}
        if other is not None:
            self.left[0, 2] = deque(other)
        self.started: dict[tuple[int, int], list[Any]] = {key: [] for key in self.left}
        self.sent: set[tuple[Action, int]] = set()

    def go_on(self, rank: int, data: int, steps: int) -> bool:
        """Let a rank execute up to so many steps; return whether it could execute any."""
        left, before = self.left[rank, data], len(self.left[rank, data])
        while left and before - len(left) < steps and self._may_go_on(rank, data, left[0]):
            step = left.popleft()
            if step[0] == "start":
                self.started[rank, data].append(step)
            if step[0] == "transfer" and (kind := RECEIVED_AS.get(step[1].kind)):
                stage = step[1].stage + TRANSFERS[step[1].kind]
                self.sent.add((Action(stage, kind, step[1].micro_batch), data))
        return len(left) < before

    def _may_go_on(self, rank: int, data: int, step: tuple[Any, ...]) -> bool:
        if step[0] == "wait":
            of_all = [self.started[rank, d][step[1] : step[1] + 1] for d in range(3)]
            return bool(of_all[data]) and of_all == [of_all[data]] * 3
        return step[0] != "need" or (step[1], data) in self.sent


def is_finished(
    programs: list[Program], generator: random.Random, other: Program | None = None
) -> bool:
    """Let the ranks go on in random order; return whether all reach the end."""
    race = Race(programs, other)
    while waiting := [key for key, left in race.left.items() if left]:
        generator.shuffle(waiting)
        if not any(race.go_on(*key, generator.randint(1, 30)) for key in waiting):
            return False
    return True
