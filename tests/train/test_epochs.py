"""Runs whose length is a number of passes over their data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lather.config.config import Config
from lather.config.toml_file import load_run
from lather.data.batch_sizes import BatchSizes
from lather.data.order import MixturePhase, Order
from lather.errors import ConfigError, RunError
from lather.files import read_rows
from lather.sweep.results import result_of
from lather.train.display import PlainDisplay
from lather.train.loop import train
from lather.train.requests import RunRequests
from lather.train.run_dir import open_run_data
from tiny_run import last_weights, timeless_rows

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize("sizes", [BatchSizes(4), BatchSizes(8, 2, 10)])
def test_the_least_steps_with_so_many_sequences(sizes: BatchSizes) -> None:
    for number in range(1, 200):
        steps = sizes.steps_of(number)
        assert sizes.before(steps + 1) >= number
        assert steps == 1 or sizes.before(steps) < number
    assert sizes.steps_of(0) == 1


def test_sources_without_a_share_are_no_part_of_an_epoch() -> None:
    assert Order([5, 7], 0).epoch_size == 12
    assert Order([5, 7], 0, [MixturePhase(0, (0.0, 0.5))]).epoch_size == 7
    phases = [MixturePhase(0, num_sources=1), MixturePhase(9, (1.0, 2.0))]
    assert Order([5, 7], 0, phases).epoch_size == 12


def test_epochs_set_the_steps_of_a_run(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is that with the steps; stopped, it resumes to the same end, from its own file, too;
    and a further epoch continues it."""
    options: dict[str, Any] = {"batch_size": 32, "micro_batch_size": 16, "validation_every": 0}
    config = make_config(train={**options, "epochs": 0.5, "average_timescale": 0.3})
    batches = open_run_data(config, print).batches
    steps = -(-sum(batches.order.sizes) // (2 * 32))
    assert steps > 2
    outcome = train(config, PlainDisplay(1))
    assert (outcome.finished, outcome.step) == (True, steps)
    size = sum(batches.order.sizes)
    assert f"0.5 epochs of {size:,} sequences: train.steps = {steps}" in capsys.readouterr().out
    assert load_run(tmp_path / "run").train.steps == steps
    result = result_of(tmp_path / "run", config)
    assert result is not None
    assert result.loss == outcome.validation_losses[-1]

    given = replace(config.train, epochs=0.0, steps=steps)
    plain = replace(config, run_dir=str(tmp_path / "plain"), train=given)
    train(plain, PlainDisplay(100))
    stopped = replace(config, run_dir=str(tmp_path / "stopped"))
    train(stopped, PlainDisplay(100), RunRequests(stop=iter([False, True]).__next__))
    train(load_run(tmp_path / "stopped"), PlainDisplay(100))
    for other in ("plain", "stopped"):
        assert timeless_rows(tmp_path / other) == timeless_rows(tmp_path / "run")
        assert last_weights(tmp_path / other) == last_weights(tmp_path / "run")

    longer = replace(config, train=replace(config.train, epochs=1.0))
    assert train(longer, PlainDisplay(100)).step == -(-size // 32)
    read = [pair for step in range(1, -(-size // 32) + 1) for pair in batches.samples(step)]
    assert len(set(read)) == size, "every sequence was read"
    changes = (tmp_path / "run" / "changes.jsonl").read_text()
    assert '"train.epochs": [0.5, 1.0]' in changes
    assert f'"train.steps": [{steps}, ' in changes
    with pytest.raises(RunError, match=r"give as many \(train.epochs\) or more"):
        train(config, PlainDisplay(100))
    assert len([row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]) > 4


def test_a_finished_run_goes_on_with_added_data(
    make_config: MakeConfig, sets: list[str], tmp_path: Path
) -> None:
    """The continued run, and a fork at its end, read what the run with the steps reads: the added
    set alone, which has all the weight."""
    sizes: dict[str, Any] = {"batch_size": 32, "micro_batch_size": 16, "validation_every": 0}
    options: dict[str, Any] = {**sizes, "epochs": 0.25}
    added = {"path": sets[:2], "weights": [0.0, 1.0]}
    done = train(make_config(data={"path": sets[:1]}, train=options), PlainDisplay(100)).step
    for name in ("first", "plain"):
        shutil.copytree(tmp_path / "run", tmp_path / name)

    longer = make_config(data=added, train={**options, "epochs": 0.6})
    steps = train(longer, PlainDisplay(100)).step
    assert steps > done
    fork = replace(longer, run_dir=str(tmp_path / "fork"), fork_from=str(tmp_path / "first"))
    train(fork, PlainDisplay(100))
    plain = make_config(data=added, train={**sizes, "steps": steps}, run_dir=f"{tmp_path}/plain")
    train(plain, PlainDisplay(100))
    for name in ("run", "fork"):
        assert timeless_rows(tmp_path / name) == timeless_rows(tmp_path / "plain"), name
        assert last_weights(tmp_path / name) == last_weights(tmp_path / "plain"), name


def test_epochs_are_no_negative_number(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs = -1"):
        make_config(train={"epochs": -1.0})
