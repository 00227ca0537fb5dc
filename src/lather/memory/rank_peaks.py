"""Computes the peak bytes of activations of each pipeline rank, from the bytes of a chunk in each stage and the schedule; no rank is
started.

It follows the table as the executor does (`lather.pipeline.executor`). Alive between two actions are: chunks between their forward and
their backward, weight gradients between I and W, and tensors that pass between stages, from their receive, or their creation on the same
rank, to their reader, and until they are sent. Not counted: parameters with their gradients and state, the batch, and temporaries inside an
action.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lather.console import titled_table
from lather.memory.chunk_bytes import ChunkBytes, ModelChunks
from lather.memory.profile_report import first_to_last, in_mib
from lather.pipeline.executor import MOST_SENDS_UNDER_WAY
from lather.pipeline.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class StageBytes:
    """A stage of a rank, with the bytes of one chunk."""

    stage: int
    layers: tuple[int, ...]
    kept: int
    waiting: int
    chunks_at_peak: int
    """Chunks between forward and backward at the rank's peak."""
    waiting_at_peak: int
    """Chunks with deferred weight gradients at the rank's peak."""


@dataclass(frozen=True)
class RankBytes:
    """The bytes of a pipeline rank."""

    rank: int
    stages: tuple[StageBytes, ...]
    most_chunks: int
    """Maximal number of chunks between forward and backward; it may occur at another time than the peak of the bytes."""
    boundaries_at_peak: int
    """Number of activations and gradients that are sent, or wait for their reader, at the peak."""
    peak: int
    """Peak bytes."""


def rank_bytes(schedule: Schedule, chunks: ModelChunks, layers: Sequence[range]) -> list[RankBytes]:
    """Return the bytes of all pipeline ranks; `layers` are those of every stage."""
    of_stage = chunks.of_stages(layers)
    found = []
    for rank in range(schedule.num_ranks):
        walk = _BytesWalk(schedule, rank, of_stage, chunks.boundary, chunks.boundary if chunks.travels is None else chunks.travels)
        for action in schedule.ranks[rank]:
            walk.do(action)
        peak, stages = walk.at_peak, []
        for stage in schedule.stages_of(rank):
            chunk = of_stage[stage]
            stages.append(StageBytes(stage, tuple(layers[stage]), chunk.kept, chunk.waiting, peak["kept", stage], peak["waiting", stage]))
        boundaries = peak["boundary", -1] + peak["travels", -1]
        found.append(RankBytes(rank, tuple(stages), schedule.peak_live_chunks(rank), boundaries, walk.peak))
    return found


class _BytesWalk:
    """Tracks the bytes of a rank, action by action."""

    def __init__(self, schedule: Schedule, rank: int, of_stage: Sequence[ChunkBytes], boundary: int, travels: int) -> None:
        """`boundary` and `travels`: bytes of a tensor that passes to the next stage on this rank, and of one that is sent or received."""
        self.schedule, self.own = schedule, schedule.stages_of(rank)
        self.sizes: dict[tuple[str, int], int] = {("boundary", -1): boundary, ("travels", -1): travels}
        for stage, chunk in enumerate(of_stage):
            self.sizes["kept", stage], self.sizes["waiting", stage] = chunk.kept, chunk.waiting
        self.alive: Counter[tuple[str, int]] = Counter()
        self.sends: deque[Action] = deque()
        self.peak, self.at_peak = 0, Counter[tuple[str, int]]()

    def do(self, action: Action) -> None:
        for chunk in action.chunks:
            self._do(chunk)
        now = sum(number * self.sizes[what] for what, number in self.alive.items())
        if now > self.peak:
            self.peak, self.at_peak = now, Counter(self.alive)

    def _do(self, action: Action) -> None:
        kind, stage, last = action.kind, action.stage, self.schedule.num_stages - 1
        if kind is Kind.FORWARD:
            self.alive["kept", stage] += 1  # includes its input, which was a boundary
            self.alive["boundary", -1] += stage < last
            self._taken_from(stage - 1)
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self.alive["kept", stage] -= 1
            self.alive["waiting", stage] += kind is Kind.BACKWARD_INPUT
            self.alive["boundary", -1] += stage > 0
            self._taken_from(stage + 1)
        elif kind is Kind.BACKWARD_WEIGHT:
            self.alive["waiting", stage] -= 1
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            self.alive["travels", -1] += 1
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            self.alive["boundary", -1] -= 1
            self.alive["travels", -1] += 1
            self.sends.append(action)
            if len(self.sends) > MOST_SENDS_UNDER_WAY:
                self.sends.popleft()
                self.alive["travels", -1] -= 1

    def _taken_from(self, stage: int) -> None:
        """Record that the output of this stage has been read."""
        if 0 <= stage < self.schedule.num_stages:
            self.alive["boundary" if stage in self.own else "travels", -1] -= 1


def to_json(levers: Mapping[str, Sequence[RankBytes]]) -> dict[str, Any]:
    """Return the bytes by the name of the levers, as plain values."""
    return {name: [dataclasses.asdict(one) for one in ranks] for name, ranks in levers.items()}


def print_ranks(ranks: Sequence[RankBytes], console: Console) -> None:
    """Print a line per rank and stage: layers, MiB of a chunk, chunks at the peak; and the rank's peak with its first stage."""
    numbers = ("MiB of a chunk", "waiting for W", "chunks at the peak", "waiting", "in transit", "peak, MiB")
    table = titled_table("a pipeline rank's activations", ("rank", "stage", "layers"), numbers)
    for one in ranks:
        for stage in one.stages:
            is_first = stage is one.stages[0]
            rank, boundaries, peak = (str(one.rank), str(one.boundaries_at_peak), in_mib(one.peak)) if is_first else ("", "", "")
            chunk = (in_mib(stage.kept), in_mib(stage.waiting), str(stage.chunks_at_peak), str(stage.waiting_at_peak))
            table.add_row(rank, str(stage.stage), first_to_last(stage.layers), *chunk, boundaries, peak)
    console.print(table)


def print_levers(levers: Mapping[str, Sequence[RankBytes]], console: Console) -> None:
    """Print a line for each set of levers: the peak of every rank, and the largest."""
    ranks = [f"rank {one.rank}" for one in next(iter(levers.values()))]
    table = titled_table("a pipeline rank's activations at their peak, MiB", ["levers"], [*ranks, "largest"])
    for name, found in levers.items():
        peaks = [one.peak for one in found]
        table.add_row(name, *map(in_mib, (*peaks, max(peaks))))
    console.print(table)
