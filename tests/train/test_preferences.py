"""DPO from end to end: a run scores pairs of answers, a data set has them, and another run learns
to prefer the chosen ones."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from lather.cli import main
from lather.files import read_rows
from tiny_run import write_config


def make_pairs(path: Path) -> None:
    """Write pairs of which the chosen answer repeats the prompt, and the rejected one does not."""
    draw, lines = random.Random(0), []
    for _ in range(60):
        prompt = draw.randrange(10, 20)
        answers = {"chosen": [prompt] * 3, "rejected": [draw.randrange(20, 30) for _ in range(3)]}
        pair = {
            name: {"tokens": [prompt, *answer], "weights": [0, 1, 1, 1]}
            for name, answer in answers.items()
        }
        lines.append(json.dumps({**pair, "source": "drawn"}))
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    config = write_config(folder, steps=2)
    make_pairs(folder / "pairs.jsonl")
    base, scored = str(folder / "base"), str(folder / "scored.jsonl")
    assert main(["train", str(config), "--run-dir", base, "--log.sample-tokens", "0"]) == 0
    assert main(["score", base, str(folder / "pairs.jsonl"), scored]) == 0
    made = ["data", "make", str(folder / "pairs"), scored, "--token-rows", "--vocab-size", "300"]
    assert main([*made, "--holdout-every", "0", "--workers", "1"]) == 0
    return folder


def options(folder: Path, name: str) -> list[str]:
    values = {
        "init-from": folder / "base",
        "run-dir": folder / name,
        "data.path": folder / "pairs",
        "data.packing": "documents",
        "train.steps": 12,
        "optim.lr": 1e-2,
        "log.sample-tokens": 0,
    }
    words = [[f"--{key}", str(value)] for key, value in values.items()]
    return ["train", str(folder / "tiny.toml"), *sum(words, [])]  # noqa: RUF017


def test_a_run_begins_at_ln_2_and_learns_to_prefer(folder: Path) -> None:
    assert main([*options(folder, "tuned"), "--train.dpo-beta", "0.5"]) == 0
    rows = [row for row in read_rows(folder / "tuned/metrics.jsonl") if "loss" in row]
    # the reference are the weights from which the run starts
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[-1]["loss"] < 0.4


def test_dpo_refuses_a_data_set_without_pairs_unless_its_weight_is_0(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, plain = folder / "plain.jsonl", str(folder / "plain")
    rows.write_text("\n".join([json.dumps({"tokens": [5, 6, 7]})] * 20))
    made = ["data", "make", plain, str(rows), "--token-rows", "--vocab-size", "300"]
    assert main([*made, "--holdout-every", "0", "--workers", "1"]) == 0
    both = ["--data.path", str(folder / "pairs"), plain, "--train.dpo-beta", "0.5"]
    assert main([*options(folder, "mixed"), *both]) == 2
    said = f"train.dpo_beta = 0.5, but {plain} has no pairs of answers"
    assert said in " ".join(capsys.readouterr().err.split())
    assert main([*options(folder, "weighted"), *both, "--data.weights", "1", "0"]) == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["--train.patience", "1"], "train.patience = 1 is not valid: it must be 0 with"),
        (["--checkpoint.keep-best"], "checkpoint.keep_best = true is not valid: it must be false"),
    ],
)
def test_no_checkpoint_is_best_by_the_loss_that_dpo_raises(
    folder: Path, setting: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options(folder, "best"), "--train.dpo-beta", "0.5", *setting]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_run_that_packs_a_stream_is_evaluated_on_pairs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(folder / "base"), str(folder / "pairs"), "--json"]
    assert main(command) == 0
    # three labels of each of 120 answers
    assert json.loads(capsys.readouterr().out)["sets"]["pairs"]["tokens"] == 360


def test_pairs_need_dpo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(folder, "none")) == 2
    assert "which are trained by DPO: set train.dpo_beta" in capsys.readouterr().err
