"""Computes the idle time of DualPipeV's table for more ranks than there are, from durations that
were measured on few.

The durations are medians over the chunks of the inner stages in some steps of our executor (the
outer stages also have the embedding, a dense layer and the head), and
stand for every stage of the table that is replayed."""

from __future__ import annotations

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
        yield {
            "benchmark": "bubble",
            "config": {
                "pp": num_ranks,
                "micro_batches": schedule.num_micro_batches,
                "ms": {str(kind): ms for kind, ms in durations.kinds.items()},
            },
            "baseline": None,
            "idle_ms": tip,
            "bubble_fraction": tip / timeline.makespan,
            "bubble_fraction_of_all_ranks": timeline.bubble_fraction,
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


def measured_durations(events: Iterable[Event]) -> Durations:
    """Return the median duration of every kind, and of every kind on every stage, from the events
    of a step.

    Events of the same chunk on a rank are parts of an action, which waited between them. Transfers
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
    )
