"""Runs that earlier code began, resumed by this code, end where the earlier code's uninterrupted
run ended."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from stored import stored_tensors

from lather.cli import main
from lather.commands.train import _read
from lather.config.old_runs import is_old, with_earlier_defaults
from lather.config.optim import RuleOptimConfig
from lather.config.toml_file import load_config
from lather.files import read_rows
from lather.models.deepseek_v2 import DeepseekV2Config
from lather.train.loop import train
from machine import machine
from train.fixtures.make import CONFIG, FOLDER, LAST, PLACEHOLDER, RUNS, SAVED, digest, write_corpus


class Silent:
    def note(self, text: str) -> None: ...

    def step(self, row: object, num_steps: int) -> None: ...


def copy_run(name: str, working_folder: Path) -> Path:
    """Copy the run, as if it had been trained here, with the text that it was trained on."""
    write_corpus(working_folder)
    run_dir = working_folder / "run"
    shutil.copytree(FOLDER / name / "run", run_dir)
    config = run_dir / "config.toml"
    config.write_text(config.read_text("utf-8").replace(PLACEHOLDER, str(working_folder)), "utf-8")
    return run_dir


def command(name: str, folder: Path, way: str) -> list[str]:
    """Return the command that resumes the run, by its own configuration, or by the file and the
    options that it was begun with."""
    if way == "its own":
        return ["train", str(folder / "run" / "config.toml")]
    file = folder / "mine.toml"
    file.write_text(CONFIG.replace(PLACEHOLDER, str(folder)).format(name=name), "utf-8")
    return ["train", str(file)]


def last_rows(run_dir: Path) -> list[int]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


@pytest.mark.parametrize("way", ["its own", "the same command"])
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_goes_on_and_on(
    name: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the machine that trained it weights and optimizer state are equal to the bit; elsewhere
    products are rounded differently. It is stopped once more on the way."""
    run_dir = copy_run(name, tmp_path)
    before = {file: file.read_bytes() for file in (run_dir / "checkpoints" / SAVED).iterdir()}
    arguments = command(name, tmp_path, way)
    asked = iter(range(2))
    with torch.random.fork_rng():
        config = _read(arguments[1:])[0]
        assert train(config, Silent(), lambda: next(asked, None) is None).step == 6
        assert is_old(tomllib.loads((run_dir / "config.toml").read_text("utf-8")))
        status = main(arguments)
    out, err = capsys.readouterr()
    assert status == 0, err
    assert f"resuming {run_dir / 'checkpoints' / 'step-00000006'}" in out
    assert {file: file.read_bytes() for file in before} == before
    assert last_rows(run_dir) == list(range(1, 9))

    found = stored_tensors(run_dir / "checkpoints" / LAST)
    digests = json.loads((FOLDER / name / "digests.json").read_text())
    assert found.keys() == digests.keys()
    if machine() == json.loads((FOLDER / "machine.json").read_text()):
        assert [key for key, x in found.items() if digest(x) != digests[key]] == []
    else:
        weights = load_file(FOLDER / name / "weights.safetensors")
        torch.testing.assert_close({key: found[key] for key in weights}, weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("soap", ["--optim.name", "muon"], "optim.name is 'soap' there and 'muon' here"),
        (
            "soap",
            ["--optim.rest.betas", "0.8", "0.9"],
            "optim.adam_betas is [0.9, 0.95] there and [0.8, 0.9] here",
        ),
        (
            "adamw",
            ["--optim.betas", "0.8", "0.9"],
            "optim.adam_betas is [0.9, 0.95] there and [0.8, 0.9] here",
        ),
        (
            "soap",
            ["--optim.sides", "smaller"],
            "was started before optim.sides (= 'smaller') existed",
        ),
        (
            "adamw",
            ["--optim.rest.lr-factor", "4"],
            "was started before optim.rest.lr_factor (= 4.0) existed",
        ),
    ],
)
def test_what_an_old_run_was_not_begun_with_is_refused(
    name: str, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_run(name, tmp_path)
    assert main([*command(name, tmp_path, "the same command"), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "give another --run-dir" in error
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [SAVED]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("soap", ["--optim.lr", "6e-4"], "optim.lr 0.006 -> 0.0006"),
        ("adamw", ["--optim.lr", "6e-4"], "optim.lr 0.006 -> 0.0006"),
    ],
)
def test_an_old_run_may_be_changed(
    name: str, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run gets a tenth of its rate, and the old run's optimizer steps with that."""
    rates, losses = [], []
    for folder, given in ((tmp_path / "as it was", []), (tmp_path / "changed", arguments)):
        folder.mkdir()
        run_dir = copy_run(name, folder)
        first = int(SAVED.removeprefix("step-")) + 1
        assert main([*command(name, folder, "the same command"), *given]) == 0
        assert (words in capsys.readouterr().out.replace("\n", " ")) == bool(given)
        rows = [
            row
            for row in read_rows(run_dir / "metrics.jsonl")
            if "loss" in row and row["step"] >= first
        ]
        rates.append([row["lr"] for row in rows])
        losses.append([row["loss"] for row in rows])
    assert rates[1] == pytest.approx([0.1 * rate for rate in rates[0]], rel=1e-12)
    assert losses[1][0] == losses[0][0]
    assert losses[1][1:] != losses[0][1:]


@pytest.mark.parametrize(("name", "optim"), [("soap", {"betas": [0.7, 0.8]}), ("adamw", {})])
def test_the_key_of_that_time_is_taken(name: str, optim: dict[str, Any], tmp_path: Path) -> None:
    """A new run takes the old key, too."""
    file = tmp_path / "old.toml"
    file.write_text(tomli_w.dumps({"optim": {"name": name, "adam_betas": [0.8, 0.9], **optim}}))
    found = load_config(file).optim
    assert isinstance(found, RuleOptimConfig)
    assert found.rule_of("rest").betas == (0.8, 0.9)
    assert found.rule_of("matrices").betas == ((0.7, 0.8) if name == "soap" else (0.8, 0.9))


@pytest.mark.parametrize(
    ("saved", "asked", "expected"),
    [
        ({"aux_loss_alpha": 0.001}, {}, 0.001),  # begun when this was the default
        ({"aux_loss_alpha": 0.001}, {"aux_loss_alpha": 0.05}, 0.05),
        ({"aux_loss_alpha": 0.02}, {}, 0.01),
        ({"aux_loss_alpha": 0.01}, {"aux_loss_alpha": 0.001}, 0.001),
    ],
)
def test_a_default_that_has_changed_does_not_change_a_run(
    saved: dict[str, float],
    asked: dict[str, float],
    expected: float,
) -> None:
    config = with_earlier_defaults(DeepseekV2Config(**saved), DeepseekV2Config(**asked))  # type: ignore[arg-type]
    assert config == DeepseekV2Config(aux_loss_alpha=expected)
