"""A run's memory plan: what is printed before the first step, and planned bytes beside those that
were seen."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from changing_runs import run
from lather.config.config import Config
from lather.parallel.mesh import Mesh
from lather.train import memory_check
from lather.train.memory_check import FILE, MemoryCheck, differences


def notes_of_memory(config: Config) -> list[str]:
    """Train, and return what is printed about the plan."""
    return [text for text in run(config) if text.startswith("memory plan")]


def test_planned_bytes_are_those_that_a_run_has(make_config: Callable[..., Config]) -> None:
    config = make_config(log={"memory_plan": "always"})
    (note,) = notes_of_memory(config)
    assert "rank 0 needs most" in note
    (row,) = json.loads((Path(config.run_dir) / FILE).read_text())["ranks"]
    assert set(row["kinds"]) == {
        "parameters",
        "optimizer moments",
        "optimizer factors",
        "optimizer bases",
    }
    for size in row["kinds"].values():
        assert size["seen"] > 0
        assert 0 <= size["seen"] - size["planned"] <= 8 * 50  # counters of steps are on the host
    assert row["peak"]["planned"] > sum(size["seen"] for size in row["kinds"].values())
    assert row["peak"]["seen"] is None  # no allocator counts a CPU's bytes


def test_on_a_cpu_nothing_is_planned_unless_asked_for(make_config: Callable[..., Config]) -> None:
    check = MemoryCheck(make_config(), Mesh.single(torch.device("cpu")), print)
    assert not check.is_on


def test_a_run_that_will_not_fit_is_told_so(make_config: Callable[..., Config]) -> None:
    notes: list[str] = []
    check = MemoryCheck(
        make_config(log={"memory_plan": "always"}), Mesh.single(torch.device("cpu")), notes.append
    )
    check._memory = 1000
    check.before_first_step()
    assert "will not fit" in notes[0]
    assert "lather plan --memory" in notes[0]


def test_a_plan_that_takes_long_is_not_waited_for(make_config: Callable[..., Config]) -> None:
    notes, go_on = [], threading.Event()
    with (
        patch.object(memory_check, "plan", side_effect=lambda *args, **kwargs: go_on.wait()),
        patch.object(memory_check, "PATIENCE", 0.05),
    ):
        check = MemoryCheck(
            make_config(log={"memory_plan": "always"}),
            Mesh.single(torch.device("cpu")),
            notes.append,
        )
        check.before_first_step()
        go_on.set()
    assert "not finished" in notes[0]


def test_a_plan_that_cannot_be_made_stops_no_run(make_config: Callable[..., Config]) -> None:
    with patch.object(memory_check, "plan", side_effect=RuntimeError("no processes")):
        notes = notes_of_memory(make_config(log={"memory_plan": "always"}))
    assert notes == ["memory plan: failed: RuntimeError: no processes"]


@pytest.mark.parametrize(("seen", "count"), [(None, 0), (104, 0), (96, 0), (106, 1), (94, 1)])
def test_a_difference_above_five_percent_is_reported(seen: int | None, count: int) -> None:
    row: dict[str, Any] = {
        "rank": 3,
        "kinds": {"parameters": {"planned": 50, "seen": 50}},
        "peak": {"planned": 100, "seen": seen},
    }
    found = differences(row)
    assert len(found) == count
    assert all("rank 3" in text and "peak" in text for text in found)
