"""Computes the idle time of DualPipeV's table for more ranks than there are, from durations that
were measured on few.

The durations are medians over the chunks of the inner stages in some steps of our executor (the
outer stages have the embedding, a dense layer and the head, which formulas do not know of), and
stand for every stage of the table that is replayed. They are compared with DeepSeek's
formula, (P - 1)(F&B + B - 3W), and with the longest of the three chains that
`lather.pipeline.replay` derives from torch's table."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks.report import Row
from lather.pipeline.replay import Durations, Event, replay
from lather.pipeline.schedule import COMPUTE, TRANSFERS, Action, Kind, dualpipev

MICRO_BATCHES_PER_RANK = 4


def bubble_rows(ranks: list[Row], numbers_of_ranks: Sequence[int]) -> Iterator[Row]:
    """Make a row for each number of ranks; times are in milliseconds."""
    steps = [
        [
            Event(e[0], Action.from_text(e[1]), e[2], e[3])
            for rank in ranks
            for e in rank["events"][step]
        ]
        for step in range(len(ranks[0]["events"]))
    ]
    durations = inner_durations(steps)
    for num_ranks in numbers_of_ranks:
        schedule = dualpipev(num_ranks, MICRO_BATCHES_PER_RANK * num_ranks)
        timeline = replay(schedule, durations)
        tip = timeline.idle()[num_ranks - 1]
        busy = timeline.makespan - tip
        formula = dualpipev_bubble(num_ranks, durations)
        yield {
            "benchmark": "bubble",
            "config": {
                "pp": num_ranks,
                "micro_batches": schedule.num_micro_batches,
                "ms": {str(kind): ms for kind, ms in durations.kinds.items()},
            },
            "baseline": "formula",
            "idle_ms": tip,
            "formula_ms": formula,
            "chains_ms": longest_chain(num_ranks, durations),
            "times_of_formula": tip / formula,
            "bubble_fraction": tip / timeline.makespan,
            "bubble_fraction_of_all_ranks": timeline.bubble_fraction,
            "formula_fraction": formula / (formula + busy),
        }


def inner_durations(steps: Sequence[Sequence[Event]]) -> Durations:
    """Return durations of each kind in milliseconds, medians over the steps and the inner stages;
    over all stages where inner ones lack the kind."""
    num_stages = 2 * (1 + max(event.rank for event in steps[0]))
    inner, everywhere = [], []
    for events in steps:
        measured = measured_durations(events)
        everywhere.append(dict(measured.kinds))
        inner.append(
            {key: value for key, value in measured.stages.items() if 0 < key[1] < num_stages - 1}
        )
    kinds = {}
    for kind in everywhere[0]:
        if kind in COMPUTE:
            values = [value for step in inner for key, value in step.items() if key[0] is kind] or [
                step[kind] for step in everywhere
            ]
            kinds[kind] = 1e3 * median(values)
    return Durations(kinds)


def longest_chain(num_ranks: int, durations: Durations) -> float:
    """The idle time at the tip of the V by the longest chain; see `lather.pipeline.replay`."""
    f, i, w = (
        durations.of(Action(0, kind, 0))
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    b = durations.of(Action(0, Kind.BACKWARD, 0))
    both = durations.of(
        Action(-1, Kind.OVERLAP, None, (Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)))
    )
    p = num_ranks - 1
    return max(p * (both + i - 2 * w) - f, p * (both + f - 2 * w), p * (both + f - b))


def table_row(num_ranks: int, num_micro_batches: int) -> Row:
    """Time making and checking a table; returns the row, in seconds."""
    start = time.perf_counter()
    dualpipev(num_ranks, num_micro_batches)
    return {
        "benchmark": "table",
        "config": {"pp": num_ranks, "micro_batches": num_micro_batches},
        "baseline": None,
        "seconds": time.perf_counter() - start,
    }


def measured_durations(events: Iterable[Event], transfer: float = 0.0) -> Durations:
    """Return the median duration of every kind, and of every kind on every stage, from the events
    of one step.

    Events of one chunk on one rank are pieces of an action, which waited between them. Transfers
    are left out: they may have waited."""
    whole: defaultdict[tuple[int, Action, int], float] = defaultdict(float)
    for number, event in enumerate(events):
        whole[event.rank, event.action, 0 if event.action.kind in COMPUTE else number] += (
            event.end - event.start
        )
    by_kind: defaultdict[Kind, list[float]] = defaultdict(list)
    by_stage: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for (_, action, _), duration in whole.items():
        if action.kind not in TRANSFERS:
            by_kind[action.kind].append(duration)
            by_stage[action.kind, action.chunks[0].stage].append(duration)
    return Durations(
        {kind: median(values) for kind, values in by_kind.items()},
        {key: median(values) for key, values in by_stage.items()},
        transfer,
    )


def dualpipev_bubble(num_ranks: int, durations: Durations) -> float:
    """DeepSeek's idle time per rank, (P - 1)(F&B + B - 3W), from the durations per kind;
    `lather.pipeline.replay` says when it holds."""
    forward, weight = (Action(0, kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD_WEIGHT))
    backward = Action(0, Kind.BACKWARD, 0)
    overlap = Action(-1, Kind.OVERLAP, None, (forward, backward))
    by_kind = Durations(durations.kinds)
    return (num_ranks - 1) * (by_kind.of(overlap) + by_kind.of(backward) - 3 * by_kind.of(weight))
