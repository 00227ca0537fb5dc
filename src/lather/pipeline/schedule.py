"""The schedule as data: a table of the actions of every pipeline rank, in order.

DualPipeV (DeepSeek-V3, arXiv:2412.19437, and github.com/deepseek-ai/DualPipe) on P ranks has 2P
stages in the shape of a V: rank r holds stages r and 2P - 1 - r, so that loss and embedding are
both on rank 0. The table is torch's (`ScheduleDualPipeV`): its order of chunks, its sends, receives
and FSDP actions. Executor, planner, replay and picture read the same table.

Every table is checked when it is created: each chunk occurs once, no action precedes what it needs,
both ends of a transfer have the same order, and at most 2P + 1 chunks are alive on a rank. The
checks take as long as creating the table (seconds for 64 ranks and 512 micro-batches).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from lather.errors import require
from lather.torch_private import dualpipev_actions


class Kind(StrEnum):
    """The kind of an action; its value is torch's name for it in the text of a table."""

    FORWARD = "F"
    BACKWARD = "B"
    """Compute the gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """Compute only the gradient of the stage's input."""
    BACKWARD_WEIGHT = "W"
    """Compute the weight gradients that an earlier `I` deferred."""
    OVERLAP = "OVERLAP_F_B"
    """Run a forward chunk and the backward chunk of another micro-batch, interleaved."""
    SEND_F = "SEND_F"
    """Send a stage's output to the rank of the next stage."""
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    """Send the gradient of a stage's input to the rank of the previous stage."""
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    REFRESH = "REFRESH"
    """A piece of an optimizer's refresh while the rank waits for another; occurs in recorded
    timelines only, not in tables."""


COMPUTE = frozenset(
    {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.OVERLAP}
)
WHOLE_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""Actions that do not belong to a micro-batch."""
TRANSFERS = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
"""Kinds of transfers -> the stage at the other end, relative to the stage of the action."""
RECEIVED_AS = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}

_SINGLE = re.compile(rf"(\d+)({'|'.join(kind for kind in Kind if kind is not Kind.OVERLAP)})(\d*)")
_PAIR = re.compile(rf"\((\w+);(\w+)\){Kind.OVERLAP}")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank."""

    stage: int
    """-1 for OVERLAP, whose parts have their own stages."""
    kind: Kind
    micro_batch: int | None = None
    """None for actions on a whole stage (UNSHARD, RESHARD, REDUCE_GRAD), and for OVERLAP."""
    parts: tuple[Action, ...] = ()
    """The forward and the backward chunk of an OVERLAP."""

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Parse an action that `str` has written. Raises ValueError for any other text."""
        if pair := _PAIR.fullmatch(text):
            return cls(-1, Kind.OVERLAP, None, (cls.from_text(pair[1]), cls.from_text(pair[2])))
        if not (single := _SINGLE.fullmatch(text)):
            raise ValueError(
                f"{text!r} is not an action: it must look like 3F0, 0UNSHARD or "
                f"(0F3;3B1){Kind.OVERLAP}"
            )
        return cls(int(single[1]), Kind(single[2]), int(single[3]) if single[3] else None)

    @property
    def chunks(self) -> tuple[Action, ...]:
        """The parts of an OVERLAP; for any other action, the action itself."""
        return self.parts or (self,)


@dataclass(frozen=True)
class Schedule:
    """The table: `ranks[r]` holds the actions of rank r, in order. Raises ValueError if it cannot
    be executed or keeps too many chunks alive."""

    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for rank in range(self.num_ranks):
            _RankCheck(self, rank).run()
            if self.trains and (peak := self.peak_live_chunks(rank)) > 2 * self.num_ranks + 1:
                raise ValueError(
                    f"rank {rank} keeps {peak} chunks alive: at most 2 * {self.num_ranks} + 1 may "
                    "be"
                )
        _check_transfers(self)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage`, in V order."""
        return min(stage, self.num_stages - 1 - stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in the order in which a micro-batch passes through
        them."""
        return tuple(sorted({rank, self.num_stages - 1 - rank}))

    @cached_property
    def gathers_blocks(self) -> bool:
        """Whether the table has no actions on whole stages: `lather.pipeline.gathering` gathers."""
        return not any(action.kind in WHOLE_STAGE for row in self.ranks for action in row)

    def by_block(self) -> Schedule:
        """Return the table without the actions that gather, reduce and free whole stages."""
        rows = ([action for action in row if action.kind not in WHOLE_STAGE] for row in self.ranks)
        return replace(self, ranks=tuple(map(tuple, rows)))

    @property
    def trains(self) -> bool:
        """Whether the table has backward passes."""
        return any(
            chunk.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            for action in self.ranks[0]
            for chunk in action.chunks
        )

    def peer_of(self, action: Action) -> int:
        """Return the rank to which an action sends, or from which it receives."""
        return self.rank_of(action.stage + TRANSFERS[action.kind])

    def peak_live_chunks(self, rank: int) -> int:
        """Return the maximal number of live chunks of `rank`: the forward pass is done, or started
        in an overlap, and the input gradient is not done."""
        changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}
        chunks = (chunk for action in self.ranks[rank] for chunk in action.chunks)
        return max(accumulate(changes.get(chunk.kind, 0) for chunk in chunks), default=0)


def dualpipev(
    num_ranks: int, num_micro_batches: int, *, early_weight_gradients: bool = False
) -> Schedule:
    """Return the DualPipeV table for `num_ranks` pipeline ranks, including transfers and FSDP
    actions.

    With `early_weight_gradients` each W follows its I at once, instead of waiting for a bubble that
    it can fill. Then no memory is kept for weight gradients that wait, and a step takes longer.

    Raises ConfigError if there are fewer micro-batches than stages (2 * num_ranks).
    """
    require(num_ranks >= 1, "parallel.pp", num_ranks, "at least 1 rank")
    stages = 2 * num_ranks
    constraint = (
        f"at least 2 * parallel.pp = {stages} for DualPipeV on {num_ranks} "
        "pipeline ranks: give more micro-batches or fewer ranks"
    )
    require(num_micro_batches >= stages, "number of micro-batches", num_micro_batches, constraint)
    rows = [
        tuple(map(_from_torch, actions))
        for actions in dualpipev_actions(num_ranks, num_micro_batches)
    ]
    if early_weight_gradients:
        rows = [tuple(_with_early_weight_gradients(row)) for row in rows]
    return Schedule(stages, num_micro_batches, tuple(rows))


def _with_early_weight_gradients(row: Sequence[Action]) -> Iterator[Action]:
    """A rank's actions with each W right after its I, but behind the SEND_B of the gradient for
    which the rank before waits."""
    sent = {(action.stage, action.micro_batch) for action in row if action.kind is Kind.SEND_B}
    deferred = {
        (action.stage, action.micro_batch) for action in row if action.kind is Kind.BACKWARD_WEIGHT
    }
    for action in row:
        key = action.stage, action.micro_batch
        if action.kind is not Kind.BACKWARD_WEIGHT:
            yield action
        if key in deferred and action.kind is (Kind.SEND_B if key in sent else Kind.BACKWARD_INPUT):
            yield Action(action.stage, Kind.BACKWARD_WEIGHT, action.micro_batch)


def sequential(num_micro_batches: int) -> Schedule:
    """Return the table for one rank with one stage: the forward and backward pass of one
    micro-batch after the other."""
    require(num_micro_batches >= 1, "number of micro-batches", num_micro_batches, "at least 1")
    chunks = (
        Action(0, kind, m)
        for m in range(num_micro_batches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    return Schedule(
        1,
        num_micro_batches,
        ((Action(0, Kind.UNSHARD), *chunks, Action(0, Kind.REDUCE_GRAD), Action(0, Kind.RESHARD)),),
    )


def forwards(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return a table of forward passes alone, for validation: every rank runs the chunk with the
    highest stage first."""
    require(num_micro_batches >= 1, "number of micro-batches", num_micro_batches, "at least 1")
    rows: list[list[Action]] = [[] for _ in range(max(1, num_stages // 2))]
    row_of = [rows[min(stage, num_stages - 1 - stage)] for stage in range(num_stages)]
    for stage, row in enumerate(row_of):
        row.append(Action(stage, Kind.UNSHARD))
    waiting: list[deque[int]] = [
        deque(range(num_micro_batches)),
        *(deque() for _ in range(num_stages - 1)),
    ]
    while any(waiting):
        highest = {
            min(stage, num_stages - 1 - stage): stage
            for stage in range(num_stages)
            if waiting[stage]
        }
        for _, stage in sorted(highest.items()):
            micro_batch = waiting[stage].popleft()
            row_of[stage].append(Action(stage, Kind.FORWARD, micro_batch))
            if stage + 1 < num_stages:
                waiting[stage + 1].append(micro_batch)
                if row_of[stage + 1] is not row_of[stage]:
                    row_of[stage].append(Action(stage, Kind.SEND_F, micro_batch))
                    row_of[stage + 1].append(Action(stage + 1, Kind.RECV_F, micro_batch))
    for stage, row in enumerate(row_of):
        row.append(Action(stage, Kind.RESHARD))
    return Schedule(num_stages, num_micro_batches, tuple(map(tuple, rows)))


def _from_torch(action: Any) -> Action:
    parts = tuple(map(_from_torch, action.sub_actions)) if action.sub_actions else ()
    return Action(
        action.stage_index, Kind(action.computation_type.value), action.microbatch_index, parts
    )


def needs(schedule: Schedule, kind: Kind, stage: int) -> tuple[tuple[Kind, int], ...]:
    """Return the results, as (kind, stage), that `kind` on `stage` needs for the same micro-batch:
    computed on this rank, or received."""
    rank = schedule.rank_of(stage)
    match kind:
        case Kind.FORWARD if stage > 0:
            return (
                (Kind.FORWARD, stage - 1)
                if schedule.rank_of(stage - 1) == rank
                else (Kind.RECV_F, stage),
            )
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            if stage == schedule.num_stages - 1:
                return ((Kind.FORWARD, stage),)
            near = (
                (Kind.BACKWARD_INPUT, stage + 1)
                if schedule.rank_of(stage + 1) == rank
                else (Kind.RECV_B, stage)
            )
            return (Kind.FORWARD, stage), near
        case Kind.BACKWARD_WEIGHT | Kind.SEND_B:
            return ((Kind.BACKWARD_INPUT, stage),)
        case Kind.SEND_F:
            return ((Kind.FORWARD, stage),)
    return ()


def gives(kind: Kind) -> tuple[Kind, ...]:
    """Return the results that `kind` produces: B produces those of I and W."""
    return (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if kind is Kind.BACKWARD else (kind,)


class _RankCheck:
    """Checks one rank's table: micro-batches in order and each once, no action before what it
    needs, parameters unsharded when they are used."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.stages = schedule, rank, schedule.stages_of(rank)
        self.needs = {
            (kind, stage): needs(schedule, kind, stage) for stage in self.stages for kind in Kind
        }
        self.gives = {kind: gives(kind) for kind in Kind}
        # a count of micro-batches says which are done, since they come in order
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.gathered: set[int] = set()

    def run(self) -> None:
        for action in self.schedule.ranks[self.rank]:
            for chunk in action.chunks:
                self._may_start(chunk)
            for chunk in action.chunks:
                self._finish(chunk)
        for stage in self.stages:
            for kind, times in _times(self.schedule, stage).items():
                if self.done[kind, stage] != times:
                    raise ValueError(
                        f"rank {self.rank}: stage {stage} has {self.done[kind, stage]} {kind} and "
                        f"should have {times}"
                    )
        if self.gathered:
            raise ValueError(
                f"rank {self.rank}: stages {sorted(self.gathered)} are still unsharded at the end"
            )

    def _may_start(self, chunk: Action) -> None:
        kind, stage = chunk.kind, chunk.stage
        if stage not in self.stages:
            self._refuse(chunk, f"is not on one of this rank's stages, {self.stages}")
        if (chunk.micro_batch is None) != (kind in WHOLE_STAGE):
            self._refuse(
                chunk, "has a micro-batch and should have none, or has none and should have one"
            )
        for need in self.needs[kind, stage]:
            if self.done[need] <= chunk.micro_batch:  # type: ignore[operator]  # only chunks of a micro-batch need something
                self._refuse(chunk, f"comes before {need[1]}{need[0]}{chunk.micro_batch}")
        needs_parameters = kind in COMPUTE or kind in (Kind.RESHARD, Kind.REDUCE_GRAD)
        if needs_parameters and not (self.schedule.gathers_blocks or stage in self.gathered):
            self._refuse(chunk, "comes while its parameters are not unsharded")
        if kind is Kind.UNSHARD and stage in self.gathered:
            self._refuse(chunk, "comes while its parameters are unsharded already")
        if (
            kind is Kind.REDUCE_GRAD
            and self.done[Kind.BACKWARD_WEIGHT, stage] != self.schedule.num_micro_batches
        ):
            self._refuse(chunk, "comes before the last weight gradient")

    def _finish(self, chunk: Action) -> None:
        for kind in self.gives[chunk.kind]:
            if chunk.micro_batch not in (None, self.done[kind, chunk.stage]):
                self._refuse(chunk, "is out of order, or occurs twice")
            self.done[kind, chunk.stage] += 1
        if chunk.kind is Kind.UNSHARD:
            self.gathered.add(chunk.stage)
        elif chunk.kind is Kind.RESHARD:
            self.gathered.remove(chunk.stage)

    def _refuse(self, chunk: Action, problem: str) -> None:
        raise ValueError(f"rank {self.rank}: {chunk} {problem}")


def _times(schedule: Schedule, stage: int) -> dict[Kind, int]:
    """Return how often every kind must occur for `stage`; UNSHARD and RESHARD may occur any number
    of times."""
    rank, n = schedule.rank_of(stage), schedule.num_micro_batches
    from_before = stage > 0 and schedule.rank_of(stage - 1) != rank
    to_next = stage < schedule.num_stages - 1 and schedule.rank_of(stage + 1) != rank
    trained = n * schedule.trains
    return {
        Kind.REDUCE_GRAD: int(schedule.trains and not schedule.gathers_blocks),
        Kind.FORWARD: n,
        Kind.BACKWARD_INPUT: trained,
        Kind.BACKWARD_WEIGHT: trained,
        Kind.RECV_F: n * from_before,
        Kind.SEND_B: trained * from_before,
        Kind.SEND_F: n * to_next,
        Kind.RECV_B: trained * to_next,
    }


def _check_transfers(schedule: Schedule) -> None:
    """Raise ValueError unless, between any two ranks, one receives what the other sends, in the
    same order."""
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if (kind := RECEIVED_AS.get(action.kind)) is not None:
                sent[rank, schedule.peer_of(action)].append(
                    Action(action.stage + TRANSFERS[action.kind], kind, action.micro_batch)
                )
            elif action.kind in TRANSFERS:
                received[schedule.peer_of(action), rank].append(action)
    for pair in sent.keys() | received.keys():
        for index, (left, right) in enumerate(zip(sent[pair], received[pair], strict=False)):
            if left != right:
                raise ValueError(
                    f"transfer {index} from rank {pair[0]} to rank {pair[1]} is sent as {left} and "
                    f"received as {right}"
                )
