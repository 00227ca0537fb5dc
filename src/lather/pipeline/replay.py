"""The timeline of a schedule, replayed with given durations or read from a run, with its idle time
and bubble fraction.

Every rank executes its row in order. A chunk starts once the rank is free and its input is there,
later by the transfer time if that comes from another rank; transfers take none of the ranks' time.
Gathers and sums of gradients take place beside the chunks, one after the other on a rank, as on the
communicator of its data ranks; a chunk starts after the gather of its stage. Tables of `by_block`
have no such actions, and their durations change nothing there.
*Idle time* is the time in which a rank does not compute, between the first start and the last end
of a computation on any rank; the *bubble fraction* is the idle time divided by the time of all
ranks.

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

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from lather.pipeline.schedule import (
    COMPUTE,
    RECEIVED_AS,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    dualpipev,
    gives,
    needs,
)
from lather.pipeline.transfer_queues import (
    MOST_SENDS_UNDER_WAY,
    QueueOf,
    Transfer,
    TransferQueues,
    queue_per_neighbor,
    transfer_of,
)

SENT_AFTER = {Kind.RECV_F: Kind.FORWARD, Kind.RECV_B: Kind.BACKWARD_INPUT}
"""Each kind of receive -> the kind of computation, on the stage at its other end, whose result it
receives."""


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
    """Durations for a chunk of any stage; for UNSHARD and REDUCE_GRAD, of the gather and the sum of
    a whole stage. F, I and W are required if they occur in the table; B defaults to I + W, OVERLAP
    to F + B, all others to 0."""
    stages: Mapping[tuple[Kind, int], float] = field(default_factory=dict)
    """(kind, stage) -> a duration that differs from that of the kind. An OVERLAP has the stage of
    its forward chunk."""
    transfer: float = 0.0
    """Time from the end of a chunk until another rank has its result."""

    def of(self, action: Action) -> float:
        """Return the duration of an action. Raises ValueError if it is not known."""
        key = (action.kind, action.chunks[0].stage)
        if (given := self.stages.get(key, self.kinds.get(action.kind))) is not None:
            return given
        if action.kind is Kind.BACKWARD:
            parts = tuple(
                Action(action.stage, kind, action.micro_batch) for kind in gives(Kind.BACKWARD)
            )
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
        return (
            sum(idle / self.makespan for idle in self.idle().values()) / len(self.ranks)
            if self.makespan
            else 0.0
        )


def replay(schedule: Schedule, durations: Durations, queue_of: QueueOf | None = None) -> Timeline:
    """Compute when every action of `schedule` starts and ends, in O(actions). Raises ValueError if
    a duration is missing or the table deadlocks.

    A chunk waits for the receive of its input; receives and sends are shown with a duration of
    zero. Without `queue_of` every transfer takes place as soon as its sender has computed, as over
    gloo. With it transfers also wait for those before them in their queues."""
    return _Replay(schedule, durations, queue_of).run()


class _Replay:
    """A replay under way."""

    def __init__(self, schedule: Schedule, durations: Durations, queue_of: QueueOf | None) -> None:
        self.schedule, self.durations = schedule, durations
        self.ended: dict[tuple[Kind, int, int], float] = {}
        self.queues = queue_of and TransferQueues(schedule, durations.transfer, queue_of)
        self.sends: list[deque[Transfer]] = [deque() for _ in schedule.ranks]
        """Sends of each rank that it has not waited for, if there are queues."""
        self.clocks, self.positions = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
        self.beside = [0.0] * schedule.num_ranks
        """End of each rank's last gather or sum of gradients."""
        self.gathered: dict[int, float] = {}
        """End of the last gather of each stage."""
        self.events: list[list[Event]] = [[] for _ in schedule.ranks]

    def run(self) -> Timeline:
        rows = self.schedule.ranks
        while sum(self._go_on(rank) for rank in range(len(rows))):
            pass
        if stuck := [
            str(row[at]) for row, at in zip(rows, self.positions, strict=True) if at < len(row)
        ]:
            raise ValueError(f"the table deadlocks: {stuck} wait for each other")
        return Timeline(tuple(event for row in self.events for event in row))

    def _go_on(self, rank: int) -> bool:
        """Let a rank execute its next actions, up to one whose inputs are not known; returns
        whether there were any."""
        actions, first = self.schedule.ranks[rank], self.positions[rank]
        for action in actions[first:]:
            ready = self._ready(rank, action)
            if ready is None:
                break
            start = max(self.clocks[rank], ready)
            is_beside = action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD)
            if is_beside:
                start = max(start, self.beside[rank])
            end = start + (0.0 if action.kind in TRANSFERS else self.durations.of(action))
            (self.beside if is_beside else self.clocks)[rank] = end
            if action.kind is Kind.UNSHARD:
                self.gathered[action.stage] = end
            self.events[rank].append(Event(rank, action, start, end))
            self._finish(rank, action, end)
            self.positions[rank] += 1
        return self.positions[rank] > first

    def _ready(self, rank: int, action: Action) -> float | None:
        """Return when the inputs of `action` from other stages have arrived; None if that is not
        known yet."""
        found: list[float | None] = [0.0]
        if len(self.sends[rank]) > MOST_SENDS_UNDER_WAY:
            assert self.queues is not None
            found.append(self.queues.ends.get(self.sends[rank][0]))
        for chunk in action.chunks if action.kind in COMPUTE else ():
            assert chunk.micro_batch is not None
            found.append(self.gathered.get(chunk.stage, 0.0))
            for kind, stage in needs(self.schedule, chunk.kind, chunk.stage):
                if kind not in TRANSFERS:
                    found.append(self.ended.get((kind, stage, chunk.micro_batch)))
                elif self.queues:
                    found.append(self.queues.ends.get((kind, stage, chunk.micro_batch)))
                else:
                    end = self.ended.get(
                        (SENT_AFTER[kind], stage + TRANSFERS[kind], chunk.micro_batch)
                    )
                    found.append(None if end is None else end + self.durations.transfer)
        known = [end for end in found if end is not None]
        return max(known) if len(known) == len(found) else None

    def _finish(self, rank: int, action: Action, end: float) -> None:
        for chunk in action.chunks:
            if chunk.micro_batch is not None and chunk.kind in COMPUTE:
                self.ended.update(
                    ((kind, chunk.stage, chunk.micro_batch), end) for kind in gives(chunk.kind)
                )
        if not self.queues:
            return
        if len(self.sends[rank]) > MOST_SENDS_UNDER_WAY:
            self.sends[rank].popleft()
        if action.kind in TRANSFERS:
            self.queues.post(rank, action, end)
        if action.kind in RECEIVED_AS:
            self.sends[rank].append(transfer_of(action))


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
    return replay(schedule, durations, queue_per_neighbor).bubble_fraction
