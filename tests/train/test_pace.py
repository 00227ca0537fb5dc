"""How far a run is: tokens, epochs and MFU after a step, and the time that is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lather.config.config import Config
from lather.data.batch_sizes import BatchSizes
from lather.data.batches import Batches
from lather.data.order import MixturePhase, Order
from lather.device import stated_peak_flops
from lather.engine.trained_parameters import outline
from lather.files import read_rows
from lather.models.model_flops import flops_per_token
from lather.parallel.mesh import Mesh
from lather.train.display import PlainDisplay
from lather.train.loop import train
from lather.train.pace import PaceMeter, TimeLeft

CPU = Mesh.single(torch.device("cpu"))


def meter(config: Config, order: Order, sizes: BatchSizes, mesh: Mesh = CPU) -> PaceMeter:
    return PaceMeter(config, Batches([], order, sizes), mesh, lambda: 0.0)


def test_tokens_and_epochs_follow_from_the_step(config: Config) -> None:
    """4 sequences of 16 tokens a step; two sources of 20 and 4 sequences."""
    sizes = BatchSizes(4)
    pace = meter(config, Order([20, 4], 0), sizes).after(9, 64, 1.0)
    assert (pace.total_tokens, pace.epoch) == (9 * 64, 1.5)
    weighted = Order([20, 4], 0, [MixturePhase(0, (1.0, 1.0))])
    assert meter(config, weighted, sizes).after(10, 64, 1.0).epoch == 4.75  # of the smaller one
    pace = meter(config, Order([20, 4], 0), BatchSizes(4, 2, 6)).after(7, 64, 1.0)
    assert pace.total_tokens == 16 * (6 * 2 + 4)


def test_epochs_of_a_mixture_count_the_samples_that_were_read() -> None:
    phases = [MixturePhase(0), MixturePhase(24, (1.0, 3.0)), MixturePhase(64)]
    order = Order([20, 4, 7], 0, phases)
    for stop in (5, 24, 40, 64, 90):
        counts = [0, 0, 0]
        for source, _ in order.samples(0, stop):
            counts[source] += 1
        passes = [count / size for count, size in zip(counts, order.sizes, strict=True)]
        assert order.passes(stop) == pytest.approx(passes, abs=0.26), stop


def test_mfu_is_the_share_of_the_peak_of_all_devices(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, sizes = Order([20], 0), BatchSizes(4)
    assert math.isnan(meter(config, order, sizes).after(1, 64, 0.5).mfu)
    config = replace(config, log=replace(config.log, peak_flops=1e9))
    useful = flops_per_token(outline(config), config.model, 16) * 64 / 0.5
    mesh: Mesh = SimpleNamespace(device=torch.device("cpu"), size=4)  # type: ignore[assignment]
    assert meter(config, order, sizes, mesh).after(1, 64, 0.5).mfu == pytest.approx(useful / 4e9)
    config = replace(config, log=replace(config.log, peak_flops=0.0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    mesh = SimpleNamespace(device=torch.device("cuda"), size=1)  # type: ignore[assignment]
    assert meter(config, order, sizes, mesh).after(1, 64, 0.5).mfu == pytest.approx(useful / 312e12)


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000 Laptop GPU", "NVIDIA GH200 480GB"])
def test_a_gpu_with_a_similar_name_has_no_known_peak(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert stated_peak_flops(torch.device("cuda")) is None


def time_left(steps: list[float], between: list[float], total: int) -> list[float]:
    """The times left after steps of 4 sequences."""
    now = 0.0
    left = TimeLeft(total, lambda: now)
    estimates = []
    for number, (seconds, pause) in enumerate(zip(steps, between, strict=True), 1):
        now += seconds
        estimates.append(left.after(4 * number, seconds))
        now += pause
    return estimates


def test_the_first_step_does_not_mislead_the_time_left() -> None:
    estimates = time_left([500.0, 2.0, 2.0, 2.0], [0.0] * 4, total=40)
    assert math.isnan(estimates[0])
    assert estimates[1:] == [16.0, 14.0, 12.0]


def test_slow_steps_are_forgotten_and_pauses_are_not() -> None:
    steps = [5.0] * 11 + [1.0] * 120
    estimates = time_left(steps, [0.0] * 131, total=4 * 231)
    assert estimates[-1] == pytest.approx(100.0)
    estimates = time_left(
        steps, [10.0 if number % 10 == 9 else 0.0 for number in range(131)], 4 * 231
    )
    assert estimates[-1] == pytest.approx(200.0, rel=0.02)
    assert time_left([1.0] * 10, [0.0] * 10, total=40)[-1] == 0.0
    assert time_left([1.0], [0.0], total=4) == [0.0]


def test_larger_batches_at_the_end_take_longer() -> None:
    left = TimeLeft(100, lambda: 0.0)
    left.after(2, 1.0)
    assert left.after(4, 1.0) == pytest.approx(48.0)


def test_a_resumed_run_goes_on_counting(make_config: Callable[..., Config], tmp_path: Path) -> None:
    log = {"peak_flops": 1e9}
    whole = make_config(run_dir=str(tmp_path / "whole"), log=log)
    train(whole, PlainDisplay(1))
    train(make_config(run_dir=str(tmp_path / "cut"), log=log, train={"steps": 2}), PlainDisplay(1))
    train(make_config(run_dir=str(tmp_path / "cut"), log=log), PlainDisplay(1))
    rows = {
        name: [row for row in read_rows(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("whole", "cut")
    }
    for one, other in zip(*rows.values(), strict=True):
        for key in ("total_tokens", "epoch"):
            assert one[key] == other[key] > 0
        assert one["mfu"] > 0
    assert [row["seconds_left"] is None for row in rows["whole"]] == [True, False, False, False]
    assert [row["seconds_left"] is None for row in rows["cut"]] == [True, False, True, False]


def test_steps_that_compute_nothing_are_not_recent_steps() -> None:
    clock = 0.0
    left = TimeLeft(100, lambda: clock)
    for done, seconds, computed in ((1, 0.0, False), (2, 2.0, True), (3, 0.0, False)):
        clock += seconds
        assert math.isnan(left.after(done, seconds, computed=computed))
    for done in (4, 5):
        clock += 1.0
        assert left.after(done, 1.0) == pytest.approx(100 - done)
    for done in range(6, 50):
        assert left.after(done, 0.0, computed=False) == pytest.approx(100 - done)
