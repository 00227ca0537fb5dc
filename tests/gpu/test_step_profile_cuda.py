"""A profile of a run's steps on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lather.cli import main
from tiny_run import write_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_kernels_have_the_phases_of_their_launches_and_allocations_are_recorded(
    tmp_path: Path,
) -> None:
    config, run_dir = write_config(tmp_path), tmp_path / "run"
    options = ("--profile.steps", "5:6", "--profile.memory", "--train.device", "cuda")
    main(["train", str(config), "--run-dir", str(run_dir), *options])
    folder = run_dir / "profile" / "steps-5-6"
    assert (folder / "rank-0.memory.pickle").stat().st_size > 1000
    (times,) = json.loads((folder / "times.json").read_text())["ranks"]
    for parts in (times["by_phase"], times["by_kind"]):
        assert sum(parts.values()) == pytest.approx(times["seconds"])
    assert {"forward", "backward", "optimizer", "idle"} <= times["by_phase"].keys()
    assert {"matrix products", "idle"} <= times["by_kind"].keys()
    assert times["by_phase"].get("other", 0.0) < 0.1 * times["seconds"]
