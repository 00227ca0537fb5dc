"""Replayed times: worked by hand, against an independent longest-path computation, and against
DualPipeV's formula."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.pipeline_bubble import measured_durations
from lather.pipeline.replay import Durations, Event, Timeline, replay
from lather.pipeline.schedule import RECEIVED_AS, Action, Kind, Schedule, dualpipev, sequential
from lather.pipeline.transfer_queues import (
    QueueOf,
    TransferQueues,
    queue_per_neighbor,
)

cached_table = cache(dualpipev)


def one_queue(kind: Kind, peer: int) -> Hashable:
    """One communicator for all ranks of the pipeline."""
    return None


def queue_per_direction(kind: Kind, peer: int) -> Hashable:
    """Two communicators for each pair of neighbors, one for each direction."""
    return kind in RECEIVED_AS, peer


def durations(
    f: float, i: float, w: float, overlap: float | None = None, **options: float
) -> Durations:
    kinds = {Kind.FORWARD: f, Kind.BACKWARD_INPUT: i, Kind.BACKWARD_WEIGHT: w}
    return Durations(kinds if overlap is None else {**kinds, Kind.OVERLAP: overlap}, **options)


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


def test_gathers_and_sums_take_place_beside_the_chunks() -> None:
    """Two stages on one rank, by hand. The second gather waits for the first, and a chunk for the
    gather of its own stage alone. The second sum waits for the first."""
    kinds = {**durations(1.0, 1.0, 1.0).kinds, Kind.UNSHARD: 1.5, Kind.REDUCE_GRAD: 4.0}
    timeline = replay(dualpipev(1, 2), Durations(kinds))
    assert [(str(e.action), e.start, e.end) for e in timeline.events if e.end > e.start] == [
        ("0UNSHARD", 0.0, 1.5),
        ("1UNSHARD", 1.5, 3.0),
        ("0F0", 1.5, 2.5),
        ("1F0", 3.0, 4.0),
        ("0F1", 4.0, 5.0),
        ("1B0", 5.0, 7.0),
        ("(1F1;0B0)OVERLAP_F_B", 7.0, 10.0),
        ("1B1", 10.0, 12.0),
        ("1REDUCE_GRAD", 12.0, 16.0),
        ("0I1", 12.0, 13.0),
        ("0W1", 13.0, 14.0),
        ("0REDUCE_GRAD", 16.0, 20.0),
    ]
    assert timeline.idle() == {0: 0.5}


def longest_path(
    table: Schedule, f: float, i: float, w: float, overlap: float, transfer: float
) -> float:
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
                found = [place[name] for name in names if name in place]
                starts += [end(*where) + transfer * (where[0] != rank) for where in found]
        return max(starts) + lasts.get(action.kind.value, 0.0)

    return max(end(rank, len(row) - 1) for rank, row in enumerate(table.ranks))


@pytest.mark.parametrize("seed", range(20))
def test_the_makespan_is_the_longest_path(seed: int) -> None:
    generator = random.Random(seed)
    p = generator.randint(1, 4)
    table = dualpipev(p, generator.randint(2 * p, 3 * p))
    f, i, w, overlap, transfer = (generator.randint(1, 20) for _ in range(5))
    assert replay(table, durations(f, i, w, overlap, transfer=transfer)).makespan == longest_path(
        table, f, i, w, overlap, transfer
    )


def dualpipev_idle(num_ranks: int, i: float, w: float, overlap: float) -> float:
    """DeepSeek's idle time of the last rank, (P - 1)(F&B + B - 3W) with B = I + W."""
    return (num_ranks - 1) * (overlap + i + w - 3 * w)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("overlap", [20, 23, 30])
def test_the_tip_idles_as_the_formula_says(num_ranks: int, overlap: int) -> None:
    """With F = I = W this is exact, whatever the number of micro-batches; the other ranks idle as
    long or less."""
    for n in (2 * num_ranks, 2 * num_ranks + 1, 4 * num_ranks)[: 1 if num_ranks == 16 else 3]:
        idle = replay(cached_table(num_ranks, n), durations(10, 10, 10, overlap)).idle()
        assert (
            idle[num_ranks - 1] == max(idle.values()) == dualpipev_idle(num_ranks, 10, 10, overlap)
        )
        fewer = [max(0, num_ranks - 2 - rank) for rank in range(num_ranks)]
        assert list(idle.values()) == [idle[num_ranks - 1] - k * (30 - overlap) for k in fewer]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("backward_input", "backward_weight"), [(11, 9), (10, 9), (10, 8), (10.5, 9.5)]
)
def test_the_formula_holds_within_6_percent_near_equal_chunks(
    num_ranks: int, backward_input: float, backward_weight: float
) -> None:
    for overlap in (10 + backward_input + backward_weight, 25):
        given = durations(10, backward_input, backward_weight, overlap)
        idle = replay(cached_table(num_ranks, 2 * num_ranks), given).idle()[num_ranks - 1]
        expected = dualpipev_idle(num_ranks, backward_input, backward_weight, overlap)
        assert idle == pytest.approx(expected, rel=0.06)


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
    given = durations(3.0, 4.0, 2.0, 8.0, transfer=0.5)
    timeline = replay(table, given)
    measured = replace(measured_durations(timeline.events), transfer=0.5)
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


# --- queues of transfers --------------------------------------------------------------------------


def longer(table: Schedule, transfer: float, queue_of: QueueOf) -> float:
    """Return how many times as long the step takes as with transfers that wait for nothing."""
    given = durations(1.0, 1.0, 1.0, transfer=transfer)
    return replay(table, given, queue_of).makespan / replay(table, given).makespan


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("transfer", [0.0, 0.05])
@pytest.mark.parametrize(("num_ranks", "n"), [(2, 8), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_a_queue_for_each_neighbor_costs_at_most_2_percent(
    num_ranks: int, n: int, transfer: float, early: bool
) -> None:
    table = dualpipev(num_ranks, n, early_weight_gradients=early)
    for queue_of in (queue_per_neighbor, queue_per_direction):
        assert 1 <= longer(table, transfer, queue_of) <= 1.02


@pytest.mark.parametrize(("num_ranks", "n"), [(4, 8), (4, 16), (8, 16)])
def test_one_queue_for_all_neighbors_costs_a_quarter_and_more(num_ranks: int, n: int) -> None:
    assert longer(cached_table(num_ranks, n), 0.05, one_queue) > 1.25


def test_a_transfer_waits_for_those_before_it_on_both_ranks() -> None:
    """Rank 1 starts a receive from rank 0 before one from rank 2, which sends first."""
    peers = {"0SEND_F0": 1, "1RECV_F0": 0, "4RECV_F0": 2, "3SEND_F0": 1}
    table: Any = SimpleNamespace(peer_of=lambda action: peers[str(action)])
    ends = {}
    for queue_of in (one_queue, queue_per_neighbor):
        queues = TransferQueues(table, 0.5, queue_of)
        for rank, action, at in (
            (1, "1RECV_F0", 0.0),
            (1, "4RECV_F0", 0.0),
            (2, "3SEND_F0", 1.0),
            (0, "0SEND_F0", 4.0),
        ):
            queues.post(rank, Action.from_text(action), at)
        ends[queue_of] = queues.ends
    first, second = (Kind.RECV_F, 1, 0), (Kind.RECV_F, 4, 0)
    assert ends[queue_per_neighbor] == {first: 4.5, second: 1.5}
    assert ends[one_queue] == {first: 4.5, second: 5.0}
