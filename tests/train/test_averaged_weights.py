"""Averaged weights: beside a sum in fp64, over resumes and changes, where they are validated, and
where commands and other runs read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import bytes_by_file, same_bits, stored_tensors
from torch import Tensor

from changing_runs import run
from lather.checkpoint.folder import checkpoint_path, list_checkpoints
from lather.cli import main
from lather.commands.exchange import export_command
from lather.config.config import Config
from lather.errors import CheckpointError, ConfigError
from lather.evaluation.scoring import score_set
from lather.evaluation.sets import open_sets
from lather.files import read_rows
from lather.models.hf.model_folder import open_hugging_face
from lather.parallel.local_parameters import LocalParameters
from lather.train.memory_check import FILE as MEMORY
from lather.train.requests import TimeLimit
from lather.train.trained_model import TrainedModel
from tiny_run import timeless_rows

ConfigMaker = Callable[..., Config]
STEPS = 6
PREFIX = "average/"


@pytest.fixture
def averaging(make_config: ConfigMaker, tmp_path: Path) -> ConfigMaker:
    """Make configurations with an average, of six steps with a checkpoint after each."""

    def make(**changes: Any) -> Config:
        train = {"steps": STEPS, "average_timescale": 0.4, **changes.pop("train", {})}
        checkpoint = {"every": 1, "keep_last": STEPS + 1}
        run_dir = str(tmp_path / changes.pop("run_dir", "run"))
        return make_config(run_dir=run_dir, train=train, checkpoint=checkpoint, **changes)

    return make


def stored(config: Config, step: int = STEPS) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint by hand; weights in bf16 with their remainders."""
    tensors = stored_tensors(checkpoint_path(Path(config.run_dir) / "checkpoints", step))
    for name in [name.removesuffix("/remainder") for name in tensors if "/remainder" in name]:
        rest = tensors[f"{name}/remainder"].view(torch.int16).squeeze(-1).int()
        bits = (tensors[name].view(torch.int16).int() << 16) + rest
        tensors[name] = bits.view(torch.float32)
    return tensors


def errors(config: Config, timescale: float, first: int = 1) -> dict[str, float]:
    """Return by parameter the largest difference of the last average from the sum over the
    checkpoints since the step `first`, in fp64 from its definition, relative to the change of the
    weights meanwhile."""
    constant = timescale * STEPS
    factors = [math.exp(-(STEPS - step) / constant) for step in range(first, STEPS + 1)]
    checkpoints = [stored(config, step) for step in range(first, STEPS + 1)]
    worst = {}
    for name, average in checkpoints[-1].items():
        if name.startswith(PREFIX):
            weights = [tensors[name.removeprefix(PREFIX)].double() for tensors in checkpoints]
            pairs = zip(factors, weights, strict=True)
            mean = sum(factor * w for factor, w in pairs) / sum(factors)  # type: ignore[operator]
            moved = (weights[-1] - weights[0]).abs().max().clamp(min=1e-9)
            worst[name] = float((average - mean).abs().max() / moved)
    return worst


NARROW = {"precision": "bf16", "weight_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"tie_word_embeddings": True}, "train": {"frozen": ["layers.0.*"]}},
        {"train": NARROW},
        {"train": NARROW, "optim": {"weight_rounding": "stochastic"}},
    ],
    ids=["plain", "tied and frozen", "remainders", "stochastic"],
)
def test_the_average_is_the_sum_in_fp64(averaging: ConfigMaker, changes: dict[str, Any]) -> None:
    config = averaging(**changes)
    run(config)
    tensors = stored(config)
    frozen = config.train.frozen
    trained = {name for name in tensors if "/" not in name and "correction_bias" not in name}
    trained -= {name for name in trained if frozen and name.startswith("layers.0.")}
    assert {name for name in tensors if name.startswith(PREFIX)} == {PREFIX + x for x in trained}
    assert {tensors[PREFIX + name].dtype for name in trained} == {torch.float32}
    found = errors(config, 0.4)
    assert max(found.values()) < 1e-3
    assert max(errors(config, 0.4 * 1.01).values()) > 1e-3


def test_a_resumed_run_has_the_same_bits(averaging: ConfigMaker) -> None:
    config, whole = averaging(run_dir="resumed"), averaging(run_dir="whole")
    run(config, stop_after=2)
    run(config)
    run(whole)
    assert timeless_rows(Path(config.run_dir)) == timeless_rows(Path(whole.run_dir))
    for path, expected in zip(*(checkpoints(each) for each in (config, whole)), strict=True):
        assert same_bits(path, expected)


def checkpoints(config: Config) -> list[Path]:
    return list_checkpoints(Path(config.run_dir) / "checkpoints")


def test_an_average_may_begin_change_and_end_in_a_run(averaging: ConfigMaker) -> None:
    before, after = averaging(train={"average_timescale": 0.0}), averaging()
    run(before, stop_after=3)
    assert not any(name.startswith(PREFIX) for name in stored(before, 3))
    notes = run(after, stop_after=2)
    assert any("train.average_timescale 0 -> 0.4" in note for note in notes)
    began, now = stored(after, 3), stored(after, 5)
    rates = {step: math.expm1(-1 / 2.4) / math.expm1(-step / 2.4) for step in (4, 5)}
    for name in (name for name in now if name.startswith(PREFIX)):
        weight = name.removeprefix(PREFIX)
        expected = began[weight].double()
        for step, rate in rates.items():
            expected += rate * (stored(after, step)[weight] - expected)
        torch.testing.assert_close(now[name].double(), expected, rtol=1e-6, atol=1e-8)
    run(averaging(train={"average_timescale": 0.0}))
    assert not any(name.startswith(PREFIX) for name in stored(before))
    rows = validations(before)
    assert [row["step"] for row in rows if "average_validation_loss" in row] == [4]


def validations(config: Config) -> list[dict[str, Any]]:
    rows = read_rows(Path(config.run_dir) / "metrics.jsonl")
    return [row for row in rows if "validation_loss" in row]


def test_a_step_that_changes_nothing_does_not_count(
    averaging: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = averaging(train={"max_skipped_steps": STEPS})
    run(config, stop_after=3)
    collect = LocalParameters.collect_gradients

    def collect_badly(parameters: LocalParameters) -> None:
        collect(parameters)
        parameters.gradients()[0].view(-1)[0] = torch.nan

    monkeypatch.setattr(LocalParameters, "collect_gradients", collect_badly)
    run(config)
    before, after = stored(config, 3), stored(config)
    assert all(after[name].equal(before[name]) for name in after if name.startswith(PREFIX))


@pytest.mark.parametrize("narrow", [{}, NARROW], ids=["fp32", "bf16"])
def test_validation_of_the_average_is_that_of_its_weights_and_leaves_no_trace(
    averaging: ConfigMaker, narrow: dict[str, str]
) -> None:
    """Rounded to the nearest, weights in bf16 have no remainders."""
    optim = {"weight_rounding": "nearest"} if narrow else {}
    config = averaging(run_dir="often", train={"validation_every": 1, **narrow}, optim=optim)
    seldom = averaging(run_dir="seldom", train={"validation_every": 0, **narrow}, optim=optim)
    run(config)
    run(seldom)
    assert same_bits(checkpoints(config)[-1], checkpoints(seldom)[-1])
    rows = validations(config)
    assert ["average_validation_loss" in row for row in rows] == [False, *[True] * STEPS]
    losses = [loss_of(config, weights) for weights in ("raw", "average")]
    expected = [rows[-1]["validation_loss"], rows[-1]["average_validation_loss"]]
    assert losses == pytest.approx(expected, rel=1e-2 if narrow else 1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3


def loss_of(config: Config, weights: str) -> float:
    """Return the loss of the chosen weights on the sequences on which the run is validated."""
    trained = TrainedModel.find(config.run_dir, weights=weights)
    (held_out,) = open_sets(trained, (), "", config.train.sequence_length)
    indices = held_out.indices(config.train.validation_sequences)
    with trained.precision(torch.device("cpu")):
        return score_set(trained.decoder("cpu"), held_out.source, indices, 4, None).as_row()["loss"]


def exported(config: Config, weights: str, folder: Path, *more: str) -> dict[str, Tensor]:
    """Export in fp32 by the command; return the tensors under Lather's names."""
    options = ["--weights", weights, "--dtype", "fp32", *more]
    export_command([config.run_dir, str(folder), *options])
    source = open_hugging_face(folder)[0]
    return {name: source.read(name) for name in source.tensors}


def test_exports_are_means_made_by_hand(
    averaging: ConfigMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = averaging(moe={"bias_update_rate": 0.0})
    run(config)
    last = [stored(config, step) for step in (STEPS - 2, STEPS - 1, STEPS)]
    raw = exported(config, "raw", tmp_path / "raw")
    average = exported(config, "average", tmp_path / "average")
    mean = exported(config, "last:3", tmp_path / "mean")
    earlier = exported(config, "last:3", tmp_path / "earlier", "--step", str(STEPS - 1))
    assert "step-00000006, average weights, in fp32" in capsys.readouterr().out
    assert raw.keys() == average.keys() == mean.keys()
    for name, x in raw.items():
        assert x.equal(last[-1][name])
        assert average[name].equal(last[-1][PREFIX + name])
        expected = torch.stack([tensors[name].double() for tensors in last]).mean(0)
        torch.testing.assert_close(mean[name].double(), expected, rtol=1e-6, atol=1e-9)
    assert not all(earlier[name].equal(mean[name]) for name in mean)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("average", "step-00000006: has no averaged weights, .* train.average_timescale = 0"),
        ("last:7", "only 6 checkpoints up to step 6: .* checkpoint.keep_last"),
        ("last:1", "--weights = 'last:1' is not valid: it must be raw, average, or last:N with N"),
        ("ema", "--weights = 'ema' is not valid"),
    ],
)
def test_weights_that_are_not_there_are_refused(
    averaging: ConfigMaker,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    weights: str,
    message: str,
) -> None:
    config = averaging(train={"average_timescale": 0.0})
    run(config)
    assert main(["export", config.run_dir, str(tmp_path / "out"), "--weights", weights]) != 0
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out").exists()


def test_a_run_begins_with_the_average_of_another(averaging: ConfigMaker) -> None:
    config = averaging(run_dir="first")
    run(config)
    second = {"init_from": config.run_dir, "init_weights": "average", "run_dir": "second"}
    new = averaging(**second, optim={"lr": 0.0})
    run(new)
    first, weights = stored(config), stored(new)
    names = [name for name in first if PREFIX + name in first]
    assert names
    assert all(weights[name].equal(first[PREFIX + name]) for name in names)
    assert not all(weights[name].equal(first[name]) for name in names)
    tuned = averaging(**{**second, "run_dir": "tuned"}, lora={"rank": 2})
    run(tuned)  # the base weights are read in another way, and stay
    assert all(stored(tuned)[name].equal(first[PREFIX + name]) for name in names)
    averaged = [name for name in stored(tuned) if name.startswith(PREFIX)]
    assert averaged
    assert all("lora" in name for name in averaged)
    found = errors(tuned, 0.4)
    assert max(found.values()) < 1e-3


def test_initial_weights_that_are_not_there_are_refused(
    averaging: ConfigMaker, tmp_path: Path
) -> None:
    config = averaging(run_dir="first", train={"average_timescale": 0.0})
    run(config)
    export_command([config.run_dir, str(tmp_path / "published")])
    new = {"init_weights": "average", "run_dir": "second"}
    with pytest.raises(CheckpointError, match="first/checkpoints/step-00000006: has no averaged"):
        run(averaging(**new, init_from=config.run_dir))
    assert not Path("second").exists()
    with pytest.raises(ConfigError, match="must be raw without init_from"):
        averaging(**new)
    with pytest.raises(ConfigError, match="init_weights = 'average' applies to runs"):
        run(averaging(**new, init_from=str(tmp_path / "published")))


def test_planned_bytes_are_those_of_a_run(averaging: ConfigMaker) -> None:
    sizes = []
    for timescale in (0.0, 0.4):
        config = averaging(
            run_dir=f"run-{timescale}",
            train={"average_timescale": timescale},
            log={"memory_plan": "always"},
        )
        run(config)
        (row,) = json.loads((Path(config.run_dir) / MEMORY).read_text())["ranks"]
        bytes_of_file = bytes_by_file(checkpoints(config)[-1])["rank-00000.safetensors"]
        sizes.append((row["kinds"]["parameters"], row["peak"]["planned"], bytes_of_file))
    (before, peak, written), (after, new_peak, new_written) = sizes
    averages = sum(x.nbytes for name, x in stored(config).items() if name.startswith(PREFIX))
    assert after["seen"] - before["seen"] == after["planned"] - before["planned"] == averages
    assert new_peak - peak == new_written - written == averages


def test_a_launch_with_a_limit_knows_the_bytes_of_its_first_checkpoint(
    averaging: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = averaging(train={"minutes": 9.0}, optim={"name": "soap"})
    estimates = []
    monkeypatch.setattr(
        "lather.train.loop.TimeLimit", lambda *args: estimates.append(args) or TimeLimit(*args)
    )
    run(config)
    (_, _, estimate), written = estimates[0], bytes_by_file(checkpoints(config)[0])
    assert estimate == sum(written.values())
