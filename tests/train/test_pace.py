"""Steps that become several times slower are told once, with the reason if it can be seen."""

from __future__ import annotations

import pytest
import torch

from lather.train import pace
from lather.train.pace import IN_A_ROW, Pace


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose last number says how many other programs run; three ranks are the
    run's."""
    running = [0]
    monkeypatch.setattr(pace, "other_programs", lambda own: running[-1] if own == 3 else -1)
    monkeypatch.setattr(pace, "num_cores", lambda: 2)
    return running


def notes_of(*seconds: float, on_cpu: bool = True) -> list[str]:
    notes: list[str] = []
    watched = Pace(notes.append, on_cpu, ranks=3)
    watched.begin()
    for one in seconds:
        watched.saw(one)
    return notes


QUICK = [0.37, 0.35, 0.37, 0.39, 0.37]


def test_steps_beside_another_program_are_told_once_with_the_remedy(others: list[int]) -> None:
    notes: list[str] = []
    watched = Pace(notes.append, on_cpu=True, ranks=3)
    for one in QUICK * 4:
        watched.saw(one)
    others.append(2)
    for number, one in enumerate([1.5, 1.6, 1.4, 1.9, 1.6] * 3, 1):
        watched.saw(one)
        assert len(notes) == (number >= IN_A_ROW)
    assert notes[0].startswith(
        "the last 5 steps took 1.6 s each, 4.3 times as long as those before (0.37 s): "
        "other programs run on this machine (2, with 2 cores for this run)"
    )
    assert notes[0].endswith("start it again, which lets its threads wait less for each other")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_without_another_program_the_doctor_is_named(on_cpu: bool, others: list[int]) -> None:
    others.append(0 if on_cpu else 2)  # other programs on the CPU do not slow a GPU
    (note,) = notes_of(*QUICK * 2, *[2.0] * IN_A_ROW, on_cpu=on_cpu)
    assert note.endswith("lather doctor shows whether memory, disk, devices and links are well")


@pytest.mark.parametrize(
    "seconds",
    [
        [9.0, *QUICK * 3],  # the first step compiles
        [*QUICK, 5.0, *QUICK, 5.0, 5.0, *QUICK],  # a refresh, a moment of other work
        [*QUICK, *[1.0] * 20],  # slower, but not several times
        [1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0],  # too few steps to know what is usual
    ],
)
def test_single_steps_and_small_changes_are_not_told(
    seconds: list[float], others: list[int]
) -> None:
    assert notes_of(*seconds) == []


@pytest.mark.parametrize(
    ("running", "threads", "cores", "is_told"),
    [(0, 2, 2, False), (1, 2, 2, True), (1, 1, 4, False), (2, 1, 4, True), (1, 2, 4, True)],
)
def test_programs_that_want_the_same_cores_at_the_start_are_told(
    running: int,
    threads: int,
    cores: int,
    is_told: bool,
    others: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks have so many threads each."""
    others.append(running)
    monkeypatch.setattr(pace, "num_cores", lambda: cores)
    torch.set_num_threads(threads)
    try:
        notes = notes_of()
    finally:
        torch.set_num_threads(1)
    assert bool(notes) == is_told
    assert notes_of(on_cpu=False) == []
