"""The timeline of a schedule, replayed with given durations or read from a run, with its idle time
and bubble fraction.

Every rank executes its row in order. A chunk starts once the rank is free and its input is
computed; transfers take no time.
*Idle time* is the time in which a rank does not compute, between the first start and the last end
on any rank; the *bubble fraction* is the idle time divided by the time of all ranks.

DeepSeek gives DualPipeV's bubble as (PP/2 - 1)(F&B + B - 3W) for PP stages on PP/2 ranks
(github.com/deepseek-ai/DualPipe), in durations of a *stage's* chunk, half of a rank's layers; that
is (P - 1)(F&B + B - 3W) with P ranks, for any number of micro-batches. In a replay of torch's table
this is the idle time of rank P - 1, at the tip of the V, exactly if F = I = W, for any F&B from
max(F, B) to F + B. In general the tip's idle time is that of the longest of three chains,

    max((P - 1)(F&B + I - 2W) - F, (P - 1)(F&B + F - 2W), (P - 1)(F&B + F - B)),

if W <= F or I <= F (otherwise a fourth chain can be longer). The first is the formula minus F. So
with I >= F >= W the formula is too high by min(F, (P - 1)(I - F)): by 4 % for I = 1.1 F, W = 0.9 F,
F&B = F + B and P = 2 to 8, by 8 % for I = 1.2 F, W = 0.8 F and P = 2. With I < F or W > F the third
chain counts and the formula is too low: by 43 % for I = 0.8 F, W = 1.2 F. The other ranks are idle
as long as the tip if F&B = F + B, and shorter otherwise: rank r < P - 1 has P - 2 - r fewer
overlapped pairs, each of which saves time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from lather.pipeline.schedule import COMPUTE, Action, Kind, Schedule, dualpipev, gives


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its times, or a part of an action that was interrupted by a wait."""

    rank: int
    action: Action
    start: float
    end: float
    """In the unit of the durations; measured times are in seconds, on one clock for all ranks."""


@dataclass(frozen=True)
class Durations:
    """Durations of actions, without waits for input."""

    kinds: Mapping[Kind, float]
    """Durations for a chunk of any stage. F, I and W are required if they occur in the table; B
    defaults to I + W, OVERLAP to F + B, all others to 0."""
    stages: Mapping[tuple[Kind, int], float] = field(default_factory=dict)
    """(kind, stage) -> a duration that differs from that of the kind. An OVERLAP has the stage of
    its forward chunk."""

    def of(self, action: Action) -> float:
        """Return the duration of an action. Raises ValueError if it is not known."""
        key = action.kind, action.chunks[0].stage
        duration = self.stages.get(key, self.kinds.get(action.kind))
        if duration is not None:
            return duration
        if action.kind not in COMPUTE:
            return 0.0
        parts = action.parts
        if action.kind is Kind.BACKWARD:
            parts = tuple(
                Action(action.stage, kind, action.micro_batch) for kind in gives(action.kind)
            )
        if not parts:
            raise ValueError(f"no duration for {action}: give one for {action.kind.name}")
        return sum(map(self.of, parts))


@dataclass(frozen=True)
class Timeline:
    """Actions of every rank with their times. A rank that does not compute is idle."""

    events: tuple[Event, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def computing(self) -> tuple[Event, ...]:
        """The events in which ranks compute."""
        return tuple(event for event in self.events if event.action.kind in COMPUTE)

    @cached_property
    def start(self) -> float:
        return min((event.start for event in self.computing), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Time from the first start of a computation to the last end, on any rank."""
        return max((event.end for event in self.computing), default=0.0) - self.start

    def idle(self) -> dict[int, float]:
        """Return, by rank, the part of the makespan in which it does not compute."""
        busy: defaultdict[int, float] = defaultdict(float)
        for event in self.computing:
            busy[event.rank] += event.end - event.start
        return {rank: self.makespan - busy[rank] for rank in self.ranks}

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the time of all ranks."""
        idle = self.idle().values()
        return sum(time / self.makespan for time in idle) / len(idle) if self.makespan else 0.0


def replay(schedule: Schedule, durations: Durations) -> Timeline:
    """Compute when every action of `schedule` starts and ends, in O(actions). Raises ValueError if
    a duration is missing."""
    ended: dict[tuple[Kind, int, int | None], float] = {}
    clocks = [0.0] * schedule.num_ranks
    events: list[list[Event]] = [[] for _ in schedule.ranks]
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for rank, row in enumerate(schedule.ranks):
            for action in row[len(events[rank]) :]:
                inputs = [key for chunk in action.chunks for key in _inputs(schedule, chunk)]
                if not ended.keys() >= set(inputs):
                    break
                start = max(clocks[rank], *map(ended.__getitem__, inputs), 0.0)
                end = clocks[rank] = start + durations.of(action)
                events[rank].append(Event(rank, action, start, end))
                for chunk in action.chunks:
                    for kind in gives(chunk.kind):
                        ended[kind, chunk.stage, chunk.micro_batch] = end
                is_stuck = False
    assert [*map(len, events)] == [*map(len, schedule.ranks)], "the table deadlocks"
    return Timeline(tuple(event for row in events for event in row))


def _inputs(schedule: Schedule, chunk: Action) -> Iterator[tuple[Kind, int, int | None]]:
    """Yield the result of the neighboring stage that a chunk needs, as (kind, stage, micro-batch);
    results of its own stage precede it in its rank's row."""
    if chunk.kind is Kind.FORWARD and chunk.stage > 0:
        yield Kind.FORWARD, chunk.stage - 1, chunk.micro_batch
    elif chunk.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and (
        chunk.stage < schedule.num_stages - 1
    ):
        yield Kind.BACKWARD_INPUT, chunk.stage + 1, chunk.micro_batch


@cache
def bubble_of_layers(
    layers: tuple[int, ...], num_micro_batches: int, *, early_weight_gradients: bool = False
) -> float:
    """Return DualPipeV's bubble fraction for these numbers of layers, if a layer's forward and both
    halves of its backward take the same time."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    durations = Durations(
        {}, {(kind, stage): float(size) for stage, size in enumerate(layers) for kind in kinds}
    )
    schedule = dualpipev(
        len(layers) // 2, num_micro_batches, early_weight_gradients=early_weight_gradients
    )
    return replay(schedule, durations).bubble_fraction
