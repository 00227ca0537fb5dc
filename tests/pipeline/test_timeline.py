"""The clock of one rank; several ranks and waiting for each other are in
tests/distributed/test_training.py."""

import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from benchmarks.pipeline_bubble import measured_durations
from lather.parallel.fsdp_units import FsdpUnit
from lather.pipeline.picture import read_timeline
from lather.pipeline.replay import Event, Timeline
from lather.pipeline.schedule import Action, Kind
from lather.pipeline.timeline import TimelineRecorder, append_timeline

FORWARD = Action(0, Kind.FORWARD, 3)
PAIR = Action(-1, Kind.OVERLAP, None, (Action(0, Kind.FORWARD, 4), Action(1, Kind.BACKWARD, 1)))
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose time the test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_actions_from_the_start_of_the_clock_and_what_was_waited_left_out(
    clock: list[float],
) -> None:
    recorder = TimelineRecorder(CPU, rank=2)
    recorder.begin()
    clock[0] += 1
    with recorder.action(FORWARD):
        clock[0] += 2
    with recorder.action(PAIR):
        clock[0] += 3
        with recorder.waiting():
            clock[0] += 10
        clock[0] += 4
    events = recorder.end()
    assert events == [
        Event(2, FORWARD, 1.0, 3.0),
        Event(2, PAIR, 3.0, 6.0),
        Event(2, PAIR, 16.0, 20.0),
    ]
    assert measured_durations(events).kinds == {Kind.FORWARD: 2.0, Kind.OVERLAP: 7.0}
    assert Timeline(tuple(events)).idle() == {2: 10.0}


def test_nothing_is_kept_of_other_steps(clock: list[float]) -> None:
    recorder = TimelineRecorder(CPU)
    for _ in range(2):
        with recorder.action(PAIR), recorder.waiting():
            clock[0] += 1
    assert recorder.end() == []
    recorder.begin()
    with recorder.action(FORWARD):
        clock[0] += 1
    assert recorder.end() == [Event(0, FORWARD, 0.0, 1.0)]
    with recorder.action(FORWARD):
        clock[0] += 1
    recorder.begin()
    assert recorder.end() == []


def test_the_file_is_what_the_picture_reads(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    append_timeline(path, 2, [Event(0, FORWARD, 0.0, 1.0)])
    append_timeline(path, 4, [Event(1, PAIR, 0.25, 0.5), Event(0, FORWARD, 0.125, 1.0)])
    assert read_timeline(path) == (4, [Event(1, PAIR, 0.25, 0.5), Event(0, FORWARD, 0.125, 1.0)])
    row = json.loads(path.read_text().splitlines()[1])
    assert row == {
        "step": 4,
        "rank": 1,
        "action": "(0F4;1B1)OVERLAP_F_B",
        "start": 0.25,
        "end": 0.5,
    }


def test_gathers_beside_an_action_are_events_and_waits_for_them_are_left_out(
    clock: list[float],
) -> None:
    recorder = TimelineRecorder(CPU)
    unit = FsdpUnit(nn.ModuleList(), (Mock(gathered=[nn.Parameter(torch.ones(1))]),))
    on_device = FsdpUnit(nn.ModuleList(), (Mock(gathered=[]),))
    gather, total = Action(0, Kind.UNSHARD), Action(0, Kind.REDUCE_GRAD)
    recorder.begin()
    with recorder.action(FORWARD):
        clock[0] += 1
        with recorder.sharding(gather, unit):
            clock[0] += 2
        unit.unshard()
        with recorder.sharding(gather, unit), recorder.sharding(gather, on_device):
            pass  # nothing starts
        with recorder.waiting():
            clock[0] += 0.00001  # too short to count
        clock[0] += 1
        with recorder.waiting():
            clock[0] += 4
        with recorder.sharding(total, unit), recorder.sharding(total, FsdpUnit(nn.ModuleList())):
            clock[0] += 1
    assert recorder.end() == [
        Event(0, gather, 1.0, 3.0),
        Event(0, FORWARD, 0.0, pytest.approx(4.00001)),
        Event(0, total, pytest.approx(8.00001), pytest.approx(9.00001)),
        Event(0, FORWARD, pytest.approx(8.00001), pytest.approx(9.00001)),
    ]
