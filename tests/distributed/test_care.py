"""Ranks of a mesh find the same spikes, and leave out the same steps, as one process; also those
that resume between two spikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from tiny_training import Silent, make_config, start

from lather.config.config import Config
from lather.config.loop import DebugConfig
from lather.engine.engine import Engine
from lather.engine.step_reading import StepReading
from lather.files import read_rows
from lather.train.loop import train
from poisoned_data import make_poisoned
from tiny_run import last_weights, timeless_rows

pytestmark = pytest.mark.timeout(300)

STEPS, POISONED, LEFT_OUT = 25, 22, 4
MESHES: dict[str, dict[str, Any]] = {"pp2": {"pp": 2}, "ep2": {"ep": 2}}
STOPPED = "ep2"
"""The mesh of a run that is stopped and resumed."""
GOING_BACK: dict[str, dict[str, Any]] = {
    "goes back": {"spikes": "roll_back"},
    "left out": {"skip_steps": f"{LEFT_OUT} 21:{POISONED}"},
}
"""Options of two runs on a pipeline that are the same if its ranks find the spike: the last
checkpoint before it is that of step 20."""


def config_of(folder: Path, run_dir: str, parallel: dict[str, Any]) -> Config:
    return make_config(
        folder,
        run_dir,
        {
            "data": {"path": [str(folder / "poisoned")], "packing": "documents"},
            "optim": {"name": "soap", "lr": 2e-2, "precondition_frequency": 2},
            "train": {
                "steps": STEPS,
                "batch_size": 4,
                "validation_every": 0,
                "skip_steps": str(LEFT_OUT),
                "spikes": "skip",
                "average_timescale": 0.3,
                "qk_clip": 1.0,
            },
            "moe": {"bias_update_rate": 0.01},
            "parallel": parallel,
            "checkpoint": {"every": 5},
            "seed": 36,
        },
    )


def trainings(rank: int, world_size: int, folder: Path) -> dict[str, list[int]]:
    """Run to the end, and again with launches that end before and after the spike."""
    steps = {STOPPED: [start(config_of(folder, STOPPED, MESHES[STOPPED])).step]}
    stopped = config_of(folder, "stopped", MESHES[STOPPED])
    steps["stopped"] = [start(stopped, after).step for after in (2, 19, 2, 0)]
    parallel = MESHES["pp2"]
    for name, changes in GOING_BACK.items():
        config = config_of(folder, name, parallel)
        start(replace(config, train=replace(config.train, **changes)))
    return steps


def one_step(folder: Path, name: str, gradients: Callable[..., StepReading]) -> None:
    """Take a step on each mesh with these passes, and search for what is not finite."""
    with patch.object(Engine, "launch_gradients", gradients):
        for mesh, parallel in MESHES.items():
            config = config_of(folder, f"{mesh} {name}", parallel)
            loop = replace(config.train, steps=1)
            start(replace(config, train=loop, debug=DebugConfig(nan=True)))


def bent_runs(rank: int, world_size: int, folder: Path) -> None:
    """Take a step in which a layer of rank 1 makes a NaN, which reaches all ranks."""
    gradients = Engine.launch_gradients

    def bent(engine: Engine, *args: Any, **options: Any) -> StepReading:
        layer = next(iter(engine.part.layers.values()))
        change = (lambda module, args, x: (x - 1e6).sqrt()) if rank == 1 else lambda *_: None
        hook = layer.self_attn.register_forward_hook(change)
        try:
            return gradients(engine, *args, **options)
        finally:
            hook.remove()

    one_step(folder, "bent", bent)


def origin_in(run_dir: Path) -> str:
    """Return the only rank, and what it found, of the only suspect step of a run."""
    (suspect,) = [row for row in read_rows(run_dir / "metrics.jsonl") if "suspect" in row]
    (origin,) = suspect["origin"]
    return str(origin)


def test_the_rank_on_which_a_nan_began_is_named(tmp_path: Path) -> None:
    make_poisoned(tmp_path)
    run_ranks(bent_runs, 2, tmp_path, timeout=100)
    for mesh in MESHES:
        layer = 1 if mesh == "pp2" else 0
        place = f"NaN began at sqrt.default in the forward pass of layers.{layer}.self_attn"
        assert origin_in(tmp_path / f"{mesh} bent").startswith(f"rank 1: {place}")


def spoiled_runs(rank: int, world_size: int, folder: Path) -> None:
    """Take a step with a weight of rank 1 that is not finite."""
    gradients = Engine.launch_gradients

    def spoiled(engine: Engine, *args: Any, **options: Any) -> StepReading:
        if rank == 1:
            *_, last = engine.part.layers.values()
            with torch.no_grad():
                next(last.parameters()).fill_(torch.nan)
        return gradients(engine, *args, **options)

    one_step(folder, "spoiled", spoiled)


def test_the_rank_with_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    make_poisoned(tmp_path)
    run_ranks(spoiled_runs, 2, tmp_path, timeout=100)
    for mesh in MESHES:
        assert origin_in(tmp_path / f"{mesh} spoiled").startswith("rank 1: before the step ")


def test_ranks_skip_the_same_steps_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    make_poisoned(tmp_path)
    train(config_of(tmp_path, "one", {}), Silent())
    every_rank = run_ranks(trainings, 2, tmp_path, timeout=250)
    assert every_rank == [{STOPPED: [STEPS], "stopped": [2, 21, 23, STEPS]}] * 2
    for name in ("one", STOPPED):
        rows = read_rows(tmp_path / name / "metrics.jsonl")
        skipped = {row["step"]: row["skip_reason"] for row in rows if row.get("skipped")}
        assert skipped == {LEFT_OUT: "left out by train.skip_steps", POISONED: "a spike"}
        (suspect,) = [row for row in rows if "suspect" in row]
        assert len(suspect["sequences"]) == 4, "those of all ranks"
    back, left_out = (tmp_path / name for name in GOING_BACK)
    assert timeless_rows(back) == timeless_rows(left_out)
    assert last_weights(back) == last_weights(left_out)
    stopped, whole = tmp_path / "stopped", tmp_path / STOPPED
    assert timeless_rows(stopped) == timeless_rows(whole)
    assert last_weights(stopped) == last_weights(whole)
