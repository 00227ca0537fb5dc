"""`train.fp8`: the same run on every mesh, planned and real bytes, and runs that change to FP8 and
back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fp8_runs import CASES, gradient_errors
from narrow_runs import losses
from planned_runs import run_config
from ranks import run_ranks
from test_memory_plan import TOLERANCE, largest_error
from tiny_training import make_config, start, write_texts

from lather.config.config import Config
from lather.memory.dry_run import dry_run
from lather.memory.work import MICRO_BATCHES
from lather.memory.workers import Assumed, worker_processes

BF16: dict[str, Any] = {
    "train": {"precision": "bf16"},
    "optim": {"schedule": "constant"},
    "checkpoint": {"every": 2},
}
FP8: dict[str, Any] = {"train": {"fp8": "block"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    write_texts(folder)
    return folder


@pytest.mark.parametrize("world_size", CASES)
def test_gradients_on_a_mesh_are_those_of_one_process(world_size: int) -> None:
    """But for rounding; those of a process without FP8 are several times as far away."""
    cases = CASES[world_size]
    for errors in run_ranks(gradient_errors, world_size, cases, timeout=200):
        for case, (error, control) in zip(cases, errors, strict=True):
            assert error < control / 3, case.name()
            assert control > 0.02, case.name()


def test_a_run_goes_on_in_fp8_and_back(folder: Path) -> None:
    """Checkpoints are the same in both."""
    start(make_config(folder, "fp8", BF16, FP8, {"train": {"steps": 4}}))
    for steps, precision in ((2, FP8), (4, {"train": {"fp8": "none"}}), (6, FP8)):
        start(make_config(folder, "changed", BF16, precision, {"train": {"steps": steps}}))
    found, whole = losses(folder / "changed"), losses(folder / "fp8")
    # the loss of a step is that of its weights: the third is the first in bf16
    assert found[:2] == whole[:2]
    assert found[2] != whole[2]
    assert found[2] == pytest.approx(whole[2], rel=1e-3)
    *rows, _ = map(json.loads, (folder / "changed/changes.jsonl").read_text().splitlines())
    changes = [row["changes"]["train.fp8"] for row in rows]
    assert changes == [["block", "none"], ["none", "block"]]


def in_fp8(config: Config) -> Config:
    return replace(config, train=replace(config.train, fp8="block"))


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        pytest.param({"ep": 2}, {}, marks=pytest.mark.grid),
        pytest.param({"pp": 2, "ep": 2}, {"memory": "recompute"}, marks=pytest.mark.grid),
        pytest.param({"ep": 2}, {"recompute": ("experts",)}, marks=pytest.mark.grid),
        ({}, {}),
    ],
    ids=str,
)
def test_planned_peaks_in_fp8(parallel: dict[str, Any], options: dict[str, Any]) -> None:
    config = in_fp8(run_config(precision="bf16", length=280, parallel=parallel, **options))
    world_size = parallel.get("pp", 1) * parallel.get("ep", 1)
    assert largest_error(config, world_size) < TOLERANCE


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.grid), "gpu"])
def test_received_rows_travel_and_are_kept_in_half_of_the_bytes(device: Any) -> None:
    """128 values and a scale in place of 128 numbers in bf16; and a byte for each weight of an
    expert, with a scale for each 128 x 128, in place of two. The first of three blocks is dense."""
    config = run_config(
        precision="bf16", layers=3, length=280, parallel={"ep": 2}, memory="recompute"
    )
    with worker_processes() as pool:
        runs = [
            pool.submit(dry_run, each, 2, Assumed(device), 0).result()
            for each in (config, in_fp8(config))
        ]
    wide, narrow = (run.largest for run in runs)
    # of 2 x 280 tokens of each rank, those that have one of 2 experts on a rank with 4 of 8
    rows = 2 * round(2 * 280 * (1 - 4 / 8 * 3 / 7))
    saved, weights = (
        int(wide.of_kind(kind).max() - narrow.of_kind(kind).max())
        for kind in ("activations", "rounded weights")
    )
    # the input that takes the gradient is one number in each block
    assert saved == 2 * rows * (2 * 128 - 128 - 4) - 2 * 2
    assert weights == 2 * 4 * (3 * 128 * 64 - 4 * 2)
    traveled, in_fp8_traveled = (run.work[MICRO_BATCHES].experts for run in runs)
    # in each of the four micro-batches of a step
    assert traveled - in_fp8_traveled == 4 * 2 * rows * (2 * 128 - 128 - 4)
