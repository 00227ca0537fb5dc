"""Steps that a run leaves out, and those that are spikes: found, named, skipped, and found again by
a run that was killed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lather.config.config import Config
from lather.config.step_ranges import step_ranges, with_range
from lather.data.dataset import MANIFEST
from lather.engine.step_reading import StepResult
from lather.errors import ConfigError
from lather.files import read_rows
from lather.train.care import Care
from lather.train.display import PlainDisplay
from lather.train.diverged import DivergedError
from lather.train.loop import train
from lather.train.metrics import StepRow
from lather.train.report import report_data
from lather.train.requests import RunRequests
from lather.train.spikes import LEAST, SpikeWatch
from poisoned_data import NUMBER, POISON, make_poisoned
from tiny_run import last_weights, timeless_rows

MakeConfig = Callable[..., Config]
STEPS, POISONED = 32, 26
"""Steps, and the one that reads the poisoned document."""


@pytest.fixture
def poisoned(tmp_path: Path) -> str:
    return str(make_poisoned(tmp_path))


@pytest.fixture
def watching(make_config: MakeConfig, poisoned: str) -> MakeConfig:
    def make(run_dir: str, **train_options: Any) -> Config:
        options = {"steps": STEPS, "batch_size": 2, "micro_batch_size": 1, "validation_every": 0}
        return make_config(
            run_dir=str(Path(poisoned).parent / run_dir),
            data={"path": [poisoned], "packing": "documents"},
            optim={"lr": 2e-2},
            train={**options, **train_options},
            checkpoint={"every": 5},
            seed=4,
        )

    return make


def rows_of(config: Config) -> list[dict[str, Any]]:
    return read_rows(Path(config.run_dir) / "metrics.jsonl")


def suspects(config: Config) -> list[dict[str, Any]]:
    return [row for row in rows_of(config) if "suspect" in row]


def stopping(after: int) -> RunRequests:
    """Requests that end a launch after so many steps."""
    calls = iter(range(10**6))
    return RunRequests(stop=lambda: next(calls) >= after)


def test_a_spike_is_found_named_and_skipped(
    watching: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is then that which leaves the step out, and the launches that ended before and after
    it change nothing."""
    config = watching("run", spikes="skip")
    train(config, PlainDisplay(1))
    (row,) = suspects(config)
    assert (row["step"], row["action"]) == (POISONED, "skipped")
    assert row["suspect"].startswith("its loss of ")
    assert len(row["sequences"]) == 2
    (poison,) = [each for each in row["sequences"] if NUMBER in each["documents"]]
    assert POISON in poison["text"]
    assert poison["data"].endswith("poisoned (train)")
    out = capsys.readouterr().out
    assert f"step {POISONED} was skipped: its loss of" in out
    assert "document" in out.split("it read ")[1]
    assert f"step {POISONED}/{STEPS}  skipped: a spike" in out
    steps = [row for row in rows_of(config) if "loss" in row]
    assert [row["step"] for row in steps if row["skipped"]] == [POISONED]
    happened = report_data(Path(config.run_dir), [])["happened"]
    assert ["", f"step {POISONED} was skipped: a spike"] in happened

    left_out = watching("left out", skip_steps=f"{POISONED}")
    train(left_out, PlainDisplay(1))
    assert last_weights(Path(left_out.run_dir)) == last_weights(Path(config.run_dir))

    stopped = watching("stopped", spikes="skip")
    for after in (22, POISONED - 22, 2, STEPS):
        train(stopped, PlainDisplay(1), stopping(after))
    assert timeless_rows(Path(stopped.run_dir)) == timeless_rows(Path(config.run_dir))
    assert last_weights(Path(stopped.run_dir)) == last_weights(Path(config.run_dir))


def test_a_spike_that_is_only_noted_is_taken(watching: MakeConfig) -> None:
    config, plain = watching("run", spikes="note"), watching("plain")
    for each in (config, plain):
        train(each, PlainDisplay(100))
    assert [row["action"] for row in suspects(config)] == ["taken"]
    assert not suspects(plain)
    assert last_weights(Path(config.run_dir)) == last_weights(Path(plain.run_dir))


def test_spikes_in_a_row_end_the_run(watching: MakeConfig) -> None:
    config = watching("run", spikes="skip", max_skipped_steps=1)
    with pytest.raises(DivergedError, match="skipped, this one as a spike"):
        train(config, PlainDisplay(100))
    assert rows_of(config)[-1]["step"] == POISONED


def test_left_out_steps_keep_numbers_batches_and_rates(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that ends among them changes nothing."""
    every: dict[str, Any] = {"validation_every": 0, "steps": 9, "average_timescale": 0.5}
    plain = make_config(run_dir=str(tmp_path / "plain"), train=every)
    train(plain, PlainDisplay(100))
    skipping = {**every, "skip_steps": "3:5 8", "max_skipped_steps": 2}
    config = make_config(run_dir=str(tmp_path / "run"), train=skipping)
    train(config, PlainDisplay(100))
    out = capsys.readouterr().out
    assert out.count("left out") == 2
    assert "steps 3 to 5 are left out (train.skip_steps)" in out
    assert "no token of it is learned" not in out
    rows, others = ([row for row in rows_of(each) if "loss" in row] for each in (config, plain))
    assert [row["lr"] for row in rows] == [row["lr"] for row in others]
    assert [row["step"] for row in rows if row["skipped"]] == [3, 4, 5, 8]
    assert {row["skip_reason"] for row in rows} == {"", "left out by train.skip_steps"}
    assert [row["tokens"] for row in rows if row["skipped"]] == [0] * 4
    assert rows[:2] != rows[2:4]
    assert [row["loss"] for row in rows[:2]] == [row["loss"] for row in others[:2]]
    happened = report_data(Path(config.run_dir), [])["happened"]
    assert ["", "steps 3 to 5 were skipped: left out by train.skip_steps"] in happened

    stopped = make_config(run_dir=str(tmp_path / "stopped"), train=skipping)
    for after in (4, 9):
        train(stopped, PlainDisplay(100), stopping(after))
    assert timeless_rows(tmp_path / "stopped") == timeless_rows(tmp_path / "run")
    assert last_weights(tmp_path / "stopped") == last_weights(tmp_path / "run")


@pytest.mark.parametrize("text", ["x", "0", "5:4", "3:", ":3", "1:2:3", "-1", "1,2", "²"])
def test_ranges_that_are_none(make_config: MakeConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=r"train.skip_steps = .*such as '120:140 300'"):
        make_config(train={"skip_steps": text})


def test_the_note_of_left_out_steps_names_the_last_one_without_counting(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "1500:2000000000000 2:2 9 300:999 7 1000:1400 900:1500 2000000000002"
    notes: list[str] = []
    batches, record = (cast(Any, None),) * 2
    care = Care(make_config(train={"skip_steps": text}), batches, record, notes.append)
    left_out = [step for step in (2, 3, 7, 299, 300, 301, 1000, 1501) if care.leaves_out(step)]
    assert left_out == [2, 7, 300, 301, 1000, 1501]
    assert notes == [
        "step 2 is left out (train.skip_steps)",
        "step 7 is left out (train.skip_steps)",
        "steps 300 to 2000000000000 are left out (train.skip_steps)",
    ]


def test_ranges_of_steps_hold_both_ends() -> None:
    assert step_ranges(" 120:122  300 ") == [range(120, 123), range(300, 301)]
    assert step_ranges("") == []


# --- statistics -----------------------------------------------------------------------------------


def result(loss: float, norm: float = 1.0) -> StepResult:
    counts_LE = torch.zeros(0, 0, dtype=torch.int64)
    return StepResult(loss, math.nan, math.nan, counts_LE, 8, grad_norm=norm)


def noise(number: int, seed: int = 0) -> list[tuple[float, float]]:
    """Losses around 3 that fall, and norms around 1."""
    chance = random.Random(seed)
    return [
        (3 - 0.002 * step + chance.gauss(0, 0.05), math.exp(chance.gauss(0, 0.2)))
        for step in range(number)
    ]


def test_noise_is_no_spike_and_a_value_far_above_it_is() -> None:
    watch = SpikeWatch(8.0, 100)
    assert not any(watch.judge(result(*values)) for values in noise(1000))
    assert watch.judge(result(0.5)) == "", "a fall is none"
    assert watch.judge(result(2.2)).startswith("its loss of 2.2 is ")
    spike = watch.judge(result(1.0, 20.0))
    assert spike.startswith("its gradient norm of 20 is ")
    assert spike.endswith("deviations above the median of the last 100 steps, 0.9977")


def test_the_first_steps_are_no_spikes() -> None:
    values = noise(LEAST)
    for number, is_spike in ((LEAST - 1, False), (LEAST, True)):
        watch = SpikeWatch(8.0, 100)
        watch.restore(values[:number])
        assert bool(watch.judge(result(9.0, 9.0))) == is_spike


def test_a_level_that_stays_is_no_spike_any_more() -> None:
    watch = SpikeWatch(8.0, 40)
    watch.restore(noise(100))
    spikes = [bool(watch.judge(result(6 + loss, norm))) for loss, norm in noise(60, seed=1)]
    assert spikes[:15] == [True] * 15
    assert not any(spikes[25:])


def test_equal_values_make_no_spikes_of_small_differences() -> None:
    watch = SpikeWatch(8.0, 40)
    watch.restore([(3.0, 1.0)] * 40)
    assert not watch.judge(result(3.2, 1.4))
    assert watch.judge(result(3.3, 1.0))


def test_rows_restore_the_last_steps() -> None:
    """Rows without a finite loss and norm, and those of other kinds, do not count."""
    values = noise(70)
    rows: list[dict[str, Any]] = []
    for step, (loss, norm) in enumerate(values):
        rows.append({"step": step, "loss": loss, "grad_norm": norm})
        rows.append({"step": step, "loss": None, "grad_norm": 2.0})
        rows.append({"step": step, "loss": 2.0, "grad_norm": None})
        rows.append({"step": step, "validation_loss": 2.0})
    watch = SpikeWatch(8.0, 50)
    assert watch.values_of(json.loads(json.dumps(rows))) == values[-50:]


def test_a_run_goes_back_to_the_checkpoint_before_a_spike(
    watching: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is then that which leaves out the steps since the checkpoint, also if it ends
    between them."""
    config = watching("run", spikes="roll_back", max_skipped_steps=1)
    train(config, PlainDisplay(1))
    out = capsys.readouterr().out
    assert f"step {POISONED} was skipped: its loss of" in out
    assert f"the run goes back to step 25, and leaves out steps 26 to {POISONED}" in out
    behind = read_rows(Path(config.run_dir) / "spikes.jsonl")
    assert {row["rolled_back_to"] for row in behind} == {25}
    steps = [row["step"] for row in behind if "loss" in row]
    assert steps == [*range(26, POISONED + 1)]
    [suspect] = [row for row in behind if "suspect" in row]
    assert suspect["step"] == POISONED
    assert suspect["sequences"]
    assert f"{POISONED} was skipped" in out.partition("(spikes.jsonl has their beginnings)")[0]
    left_out = watching("left out", spikes="roll_back", skip_steps=f"26:{POISONED}")
    train(left_out, PlainDisplay(1))
    assert last_weights(Path(left_out.run_dir)) == last_weights(Path(config.run_dir))
    assert timeless_rows(Path(left_out.run_dir)) == timeless_rows(Path(config.run_dir))

    stopped = watching("stopped", spikes="roll_back")
    for after in (22, POISONED - 21, STEPS):
        train(stopped, PlainDisplay(1), stopping(after))
    assert last_weights(Path(stopped.run_dir)) == last_weights(Path(config.run_dir))


def test_a_run_goes_back_with_the_data_that_it_has_opened(
    watching: MakeConfig, poisoned: str
) -> None:
    """They may have changed since."""

    class Losing(PlainDisplay):
        def step(self, row: StepRow, num_steps: int) -> None:
            (Path(poisoned) / MANIFEST).unlink(missing_ok=True)

    config = watching("run", spikes="roll_back")
    train(config, Losing(100), stopping(POISONED))
    assert read_rows(Path(config.run_dir) / "spikes.jsonl")


def test_spikes_before_the_next_checkpoint_end_a_run_that_goes_back(
    watching: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = SpikeWatch.judge
    late = {"late": "every step from 22 on"}

    def judged(watch: SpikeWatch, result: StepResult) -> str:
        judge(watch, result)
        return late["late"] if len(watch._losses) > 21 else ""

    monkeypatch.setattr(SpikeWatch, "judge", judged)
    config = watching("run", spikes="roll_back", max_skipped_steps=3)
    with pytest.raises(DivergedError, match="gone back to step 25 3 times"):
        train(config, PlainDisplay(100))


def test_a_range_takes_the_place_of_those_within_it() -> None:
    assert with_range("", 3, 5) == "3:5"
    assert with_range("1 3:4 9", 3, 5) == "1 9 3:5"
    assert with_range("2:4", 3, 5) == "2:4 3:5"
