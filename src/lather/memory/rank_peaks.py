"""Computes the peak bytes of activations of each pipeline rank, from the bytes of a chunk in each
stage and the schedule; no rank is started.

It follows the table as the executor does (`lather.pipeline.executor`). Alive between two actions
are: chunks between their forward and their backward, weight gradients between I and W, and tensors
that pass between stages, from their receive, or their creation on the same rank, to their reader,
and until they are sent. Not counted: parameters with their gradients and state, the batch, and
temporaries inside an action.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lather.console import titled_table
from lather.memory.chunk_bytes import ModelChunks
from lather.memory.profile_report import first_to_last, in_mib
from lather.pipeline.schedule import Kind, Schedule
from lather.pipeline.transfer_queues import MOST_SENDS_UNDER_WAY

Alive = tuple[str, int]
"""Something that may be alive: "kept" or "waiting" of a chunk in a stage, or one of the
following."""
BOUNDARY, SENT, RECEIVED = ("boundary", -1), ("sent", -1), ("received", -1)
"""A tensor that passes to the next stage, on this rank until it is sent; one that is being sent;
one that was received."""


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
    """Maximal number of chunks between forward and backward; it may occur at another time than the
    peak of the bytes."""
    boundaries_at_peak: int
    """Number of activations and gradients that are sent, or wait for their reader, at the peak."""
    peak: int
    """Peak bytes."""


def rank_bytes(schedule: Schedule, chunks: ModelChunks, layers: Sequence[range]) -> list[RankBytes]:
    """Return the bytes of all pipeline ranks; `layers` are those of every stage."""
    of_stage = chunks.of_stages(layers)
    sizes = {BOUNDARY: chunks.boundary, SENT: chunks.travels, RECEIVED: chunks.travels}
    for stage, chunk in enumerate(of_stage):
        sizes["kept", stage], sizes["waiting", stage] = chunk.kept, chunk.waiting

    def bytes_of(alive: Counter[Alive]) -> int:
        return sum(number * sizes[what] for what, number in alive.items())

    found = []
    for rank in range(schedule.num_ranks):
        at_peak = max(alive_after_actions(schedule, rank), key=bytes_of)
        stages = tuple(
            StageBytes(
                stage,
                tuple(layers[stage]),
                chunk.kept,
                chunk.waiting,
                at_peak["kept", stage],
                at_peak["waiting", stage],
            )
            for stage, chunk in enumerate(of_stage)
            if stage in schedule.stages_of(rank)
        )
        boundaries = sum(at_peak[what] for what in (BOUNDARY, SENT, RECEIVED))
        found.append(
            RankBytes(rank, stages, schedule.peak_live_chunks(rank), boundaries, bytes_of(at_peak))
        )
    return found


def alive_after_actions(schedule: Schedule, rank: int) -> Iterator[Counter[Alive]]:
    """Count what is alive on a rank after each of its actions."""
    own, alive = schedule.stages_of(rank), Counter[Alive]()

    def passes(given: int, read: int) -> None:
        """Record that a chunk's result for stage `given` was made, and that of stage `read` was
        read; the model's ends have none."""
        alive[BOUNDARY] += 0 <= given < schedule.num_stages
        if 0 <= read < schedule.num_stages:
            alive[BOUNDARY if read in own else RECEIVED] -= 1

    for action in schedule.ranks[rank]:
        for chunk in action.chunks:
            kind, stage = chunk.kind, chunk.stage
            if kind is Kind.FORWARD:
                alive["kept", stage] += 1  # includes its input, which was a boundary
                passes(stage + 1, stage - 1)
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                alive["kept", stage] -= 1
                alive["waiting", stage] += kind is Kind.BACKWARD_INPUT
                passes(stage - 1, stage + 1)
            elif kind is Kind.BACKWARD_WEIGHT:
                alive["waiting", stage] -= 1
            elif kind in (Kind.RECV_F, Kind.RECV_B):
                alive[RECEIVED] += 1
            elif kind in (Kind.SEND_F, Kind.SEND_B):
                alive[BOUNDARY] -= 1
                alive[SENT] = min(alive[SENT] + 1, MOST_SENDS_UNDER_WAY)
        yield alive.copy()


def to_json(levers: Mapping[str, Sequence[RankBytes]]) -> dict[str, Any]:
    """Return the bytes by the name of the levers, as plain values."""
    return {name: [dataclasses.asdict(one) for one in ranks] for name, ranks in levers.items()}


def print_ranks(ranks: Sequence[RankBytes], console: Console) -> None:
    """Print a line per rank and stage: layers, MiB of a chunk, chunks at the peak; and the rank's
    peak with its first stage."""
    numbers = (
        "MiB of a chunk",
        "waiting for W",
        "chunks at the peak",
        "waiting",
        "in transit",
        "peak, MiB",
    )
    table = titled_table("a pipeline rank's activations", ("rank", "stage", "layers"), numbers)
    for one in ranks:
        for stage in one.stages:
            is_first = stage is one.stages[0]
            rank, boundaries, peak = (
                (str(one.rank), str(one.boundaries_at_peak), in_mib(one.peak))
                if is_first
                else ("", "", "")
            )
            chunk = (
                in_mib(stage.kept),
                in_mib(stage.waiting),
                str(stage.chunks_at_peak),
                str(stage.waiting_at_peak),
            )
            table.add_row(
                rank, str(stage.stage), first_to_last(stage.layers), *chunk, boundaries, peak
            )
    console.print(table)


def print_levers(levers: Mapping[str, Sequence[RankBytes]], console: Console) -> None:
    """Print a line for each set of levers: the peak of every rank, and the largest."""
    ranks = [f"rank {one.rank}" for one in next(iter(levers.values()))]
    table = titled_table(
        "a pipeline rank's activations at their peak, MiB", ["levers"], [*ranks, "largest"]
    )
    for name, found in levers.items():
        peaks = [one.peak for one in found]
        table.add_row(name, *map(in_mib, (*peaks, max(peaks))))
    console.print(table)
