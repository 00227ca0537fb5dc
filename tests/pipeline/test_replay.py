"""Replayed times: worked by hand, against an independent longest-path computation, and against
DualPipeV's formula."""

from __future__ import annotations

import random
from functools import cache

import pytest

from benchmarks.pipeline_bubble import dualpipev_bubble, measured_durations
from lather.pipeline.replay import Durations, Event, Timeline, replay
from lather.pipeline.schedule import Action, Kind, Schedule, dualpipev, sequential

cached_table = cache(dualpipev)


def durations(f: float, i: float, w: float, overlap: float | None = None) -> Durations:
    kinds = {Kind.FORWARD: f, Kind.BACKWARD_INPUT: i, Kind.BACKWARD_WEIGHT: w}
    return Durations(kinds if overlap is None else {**kinds, Kind.OVERLAP: overlap})


def test_one_stage_is_never_idle() -> None:
    timeline = replay(sequential(3), durations(1.0, 1.5, 0.5))
    assert timeline.makespan == 9.0
    assert timeline.idle() == {0: 0.0}
    assert timeline.bubble_fraction == 0
    assert [(str(e.action), e.start, e.end) for e in timeline.events][:4] == [
        ("0UNSHARD", 0.0, 0.0),
        ("0F0", 0.0, 1.0),
        ("0B0", 1.0, 3.0),
        ("0F1", 3.0, 4.0),
    ]


def longest_path(table: Schedule, f: float, i: float, w: float, overlap: float) -> float:
    """Return the end of the last action, by recursion from the end: an action ends its duration
    after all that it depends on."""
    place = {
        str(chunk): (rank, at)
        for rank, row in enumerate(table.ranks)
        for at, action in enumerate(row)
        for chunk in action.chunks
    }
    lasts = {"F": f, "I": i, "W": w, "B": i + w, "OVERLAP_F_B": overlap}

    @cache
    def end(rank: int, at: int) -> float:
        action = table.ranks[rank][at]
        starts = [end(rank, at - 1) if at else 0.0]
        for chunk in action.chunks:
            near = chunk.stage - 1 if chunk.kind.value == "F" else chunk.stage + 1
            names = (
                [f"{near}F{chunk.micro_batch}"]
                if chunk.kind.value == "F"
                else [f"{near}{k}{chunk.micro_batch}" for k in "BI"]
            )
            if chunk.kind.value in ("F", "B", "I"):
                starts += [end(*place[name]) for name in names if name in place]
        return max(starts) + lasts.get(action.kind.value, 0.0)

    return max(end(rank, len(row) - 1) for rank, row in enumerate(table.ranks))


@pytest.mark.parametrize("seed", range(20))
def test_the_makespan_is_the_longest_path(seed: int) -> None:
    generator = random.Random(seed)
    p = generator.randint(1, 4)
    table = dualpipev(p, generator.randint(2 * p, 3 * p))
    times = [generator.randint(1, 20) for _ in range(4)]
    assert replay(table, durations(*times)).makespan == longest_path(table, *times)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("overlap", [20, 23, 30])
def test_the_tip_idles_as_the_formula_says(num_ranks: int, overlap: int) -> None:
    """With F = I = W this is exact, whatever the number of micro-batches; the other ranks idle as
    long or less."""
    for n in (2 * num_ranks, 2 * num_ranks + 1, 4 * num_ranks)[: 1 if num_ranks == 16 else 3]:
        given = durations(10, 10, 10, overlap)
        idle = replay(cached_table(num_ranks, n), given).idle()
        assert dualpipev_bubble(num_ranks, given) == (num_ranks - 1) * (overlap - 10)
        assert idle[num_ranks - 1] == max(idle.values()) == dualpipev_bubble(num_ranks, given)
        fewer = [max(0, num_ranks - 2 - rank) for rank in range(num_ranks)]
        assert list(idle.values()) == [idle[num_ranks - 1] - k * (30 - overlap) for k in fewer]


@pytest.mark.parametrize("seed", range(15))
def test_the_tip_idles_as_the_longest_of_three_chains(seed: int) -> None:
    generator = random.Random(seed)
    p = generator.choice((2, 3, 5))
    f, i, w = 10, generator.randint(5, 20), generator.randint(3, 10)
    overlap = generator.randint(max(f, i + w), f + i + w)
    idle = replay(
        dualpipev(p, generator.randint(2 * p, 4 * p)), durations(f, i, w, overlap)
    ).idle()[p - 1]
    assert idle == max(
        (p - 1) * (overlap + i - 2 * w) - f,
        (p - 1) * (overlap + f - 2 * w),
        (p - 1) * (overlap + f - i - w),
    )


def test_durations_of_stages_come_before_those_of_kinds() -> None:
    given = Durations(
        {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 2.0, Kind.BACKWARD_WEIGHT: 3.0},
        {(Kind.FORWARD, 3): 7.0, (Kind.BACKWARD, 0): 9.0},
    )
    names = {
        "0F0": 1.0,
        "3F0": 7.0,
        "0B1": 9.0,
        "1B1": 5.0,
        "(3F1;0B0)OVERLAP_F_B": 16.0,
        "(0F1;3B0)OVERLAP_F_B": 6.0,
        "0UNSHARD": 0.0,
    }
    assert {name: given.of(Action.from_text(name)) for name in names} == names


def test_a_missing_duration_is_named() -> None:
    with pytest.raises(ValueError, match="BACKWARD_WEIGHT"):
        replay(sequential(1), Durations({Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.0}))


def test_measured_times_give_the_durations_back() -> None:
    table = dualpipev(3, 8)
    given = durations(3.0, 4.0, 2.0, 8.0)
    timeline = replay(table, given)
    measured = measured_durations(timeline.events)
    assert measured.kinds[Kind.OVERLAP] == pytest.approx(8.0)
    assert measured.stages[Kind.BACKWARD, 5] == pytest.approx(6.0)
    assert not any(kind in (Kind.SEND_F, Kind.RECV_B) for kind in measured.kinds)
    assert replay(table, measured).makespan == pytest.approx(timeline.makespan)


def test_idle_time_is_the_time_without_computation() -> None:
    """A measured timeline starts anywhere, and waiting in a receive counts as idle."""
    rows = [
        (0, "0F0", 10.0, 11.0),
        (0, "0RECV_B0", 11.0, 14.0),
        (0, "0B0", 14.0, 16.0),
        (1, "1RECV_F0", 9.0, 11.0),
        (1, "1F0", 11.0, 12.0),
    ]
    timeline = Timeline(
        tuple(Event(rank, Action.from_text(text), start, end) for rank, text, start, end in rows)
    )
    assert timeline.makespan == 6.0
    assert timeline.idle() == {0: 3.0, 1: 5.0}
    assert timeline.bubble_fraction == pytest.approx(8 / 12)
    assert Timeline(()).bubble_fraction == 0
