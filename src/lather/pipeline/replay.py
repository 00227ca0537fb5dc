"""The timeline of a schedule, replayed with given durations or read from a run, with its idle time and bubble fraction.

Every rank executes its row in order. A chunk starts once the rank is free and its input is there, later by the transfer time if that comes
from another rank; transfers take none of the ranks' time. *Idle time* is the time in which a rank does not compute, between the first start
and the last end on any rank; the *bubble fraction* is the idle time divided by the time of all ranks.

DeepSeek gives DualPipeV's bubble as (PP/2 - 1)(F&B + B - 3W) for PP stages on PP/2 ranks (github.com/deepseek-ai/DualPipe), in durations of
a *stage's* chunk, half of a rank's layers; that is (P - 1)(F&B + B - 3W) with P ranks, for any number of micro-batches. In a replay of
torch's table this is the idle time of rank P - 1, at the tip of the V, exactly if F = I = W, for any F&B from max(F, B) to F + B. In
general the tip's idle time is that of the longest of three chains,

    max((P - 1)(F&B + I - 2W) - F, (P - 1)(F&B + F - 2W), (P - 1)(F&B + F - B)),

if W <= F or I <= F (otherwise a fourth chain can be longer). The first is the formula minus F. So with I >= F >= W the formula is too high
by min(F, (P - 1)(I - F)): by 4 % for I = 1.1 F, W = 0.9 F, F&B = F + B and P = 2 to 8, by 8 % for I = 1.2 F, W = 0.8 F and P = 2. With I <
F or W > F the third chain counts and the formula is too low: by 43 % for I = 0.8 F, W = 1.2 F. The other ranks are idle as long as the tip
if F&B = F + B, and shorter otherwise: rank r < P - 1 has P - 2 - r fewer overlapped pairs, each of which saves time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from lather.pipeline.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule, dualpipev, gives, needs

SENT_AFTER = {Kind.RECV_F: Kind.FORWARD, Kind.RECV_B: Kind.BACKWARD_INPUT}
"""Each kind of receive -> the kind of computation, on the stage at its other end, whose result it receives."""


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
    """Durations for a chunk of any stage. F, I and W are required if they occur in the table; B defaults to I + W, OVERLAP to F + B, all
    others to 0."""
    stages: Mapping[tuple[Kind, int], float] = field(default_factory=dict)
    """(kind, stage) -> a duration that differs from that of the kind. An OVERLAP has the stage of its forward chunk."""
    transfer: float = 0.0
    """Time from the end of a chunk until another rank has its result."""

    def of(self, action: Action) -> float:
        """Return the duration of an action. Raises ValueError if it is not known."""
        key = (action.kind, action.chunks[0].stage)
        if (given := self.stages.get(key, self.kinds.get(action.kind))) is not None:
            return given
        if action.kind is Kind.BACKWARD:
            parts = tuple(Action(action.stage, kind, action.micro_batch) for kind in gives(Kind.BACKWARD))
        elif action.kind not in COMPUTE:
            return 0.0
        elif not (parts := action.parts):
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
    def start(self) -> float:
        return min((event.start for event in self.events if event.action.kind in COMPUTE), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((event.end for event in self.events if event.action.kind in COMPUTE), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the first start of a computation to the last end, on any rank."""
        return self.end - self.start

    def idle(self) -> dict[int, float]:
        """Return, by rank, the part of the makespan in which it does not compute."""
        computing: defaultdict[int, float] = defaultdict(float)
        for event in self.events:
            if event.action.kind in COMPUTE:
                computing[event.rank] += event.end - event.start
        return {rank: self.makespan - computing[rank] for rank in self.ranks}

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the time of all ranks."""
        return sum(idle / self.makespan for idle in self.idle().values()) / len(self.ranks) if self.makespan else 0.0


def replay(schedule: Schedule, durations: Durations) -> Timeline:
    """Compute when every action of `schedule` starts and ends, in O(actions). Raises ValueError if a duration is missing or the table
    deadlocks.

    A chunk waits for the receive of its input; receives and sends are shown with a duration of zero.
    """
    ended: dict[tuple[Kind, int, int], float] = {}
    clocks, positions = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    events: list[list[Event]] = [[] for _ in schedule.ranks]
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, actions in enumerate(schedule.ranks):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                if (ready := _ready(schedule, action, ended, durations.transfer)) is None:
                    break
                start = max(clocks[rank], ready)
                clocks[rank] = end = start + (0.0 if action.kind in TRANSFERS else durations.of(action))
                events[rank].append(Event(rank, action, start, end))
                for chunk in action.chunks:
                    if chunk.micro_batch is not None and chunk.kind in COMPUTE:
                        ended.update(((kind, chunk.stage, chunk.micro_batch), end) for kind in gives(chunk.kind))
                positions[rank] += 1
                goes_on = True
    if stuck := [str(actions[at]) for actions, at in zip(schedule.ranks, positions, strict=True) if at < len(actions)]:
        raise ValueError(f"the table deadlocks: {stuck} wait for each other")
    return Timeline(tuple(event for row in events for event in row))


@cache
def bubble_of_layers(layers: tuple[int, ...], num_micro_batches: int, *, early_weight_gradients: bool = False) -> float:
    """Return DualPipeV's bubble fraction for these numbers of layers, if a layer's forward and both halves of its backward take the same
    time."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    durations = Durations({}, {(kind, stage): float(size) for stage, size in enumerate(layers) for kind in kinds})
    schedule = dualpipev(len(layers) // 2, num_micro_batches, early_weight_gradients=early_weight_gradients)
    return replay(schedule, durations).bubble_fraction


def _ready(schedule: Schedule, action: Action, ended: Mapping[tuple[Kind, int, int], float], transfer: float) -> float | None:
    """Return when the inputs of `action` from other stages have arrived; None if that is not known yet."""
    ready = 0.0
    for chunk in action.chunks if action.kind in COMPUTE else ():
        assert chunk.micro_batch is not None
        for kind, stage in needs(schedule, chunk.kind, chunk.stage):
            travels = kind in TRANSFERS
            result = (SENT_AFTER[kind], stage + TRANSFERS[kind]) if travels else (kind, stage)
            if (end := ended.get((*result, chunk.micro_batch))) is None:
                return None
            ready = max(ready, end + transfer * travels)
    return ready
