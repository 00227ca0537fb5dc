"""`lather eval` as a user gives it: the run's own sets, others by name, chats, JSON, the record,
and one line for each error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from lather.cli import main
from lather.data.dataset import DataSet
from lather.files import read_rows
from tiny_run import write_config

SEQUENCES = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two data sets with one more for validation, and another set."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = write_config(folder, steps=8)
    lines = folder / "lines.jsonl"
    lines.write_text(
        "\n".join(
            json.dumps({"text": f"def f{n}(x):\n    return x + {n} # \N{GRINNING FACE}é\n" * 5})
            for n in range(40)
        )
    )
    chats = folder / "chats.jsonl"
    messages = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"def {n}(x)"}]
        for n in range(40)
    ]
    chats.write_text("\n".join(json.dumps({"messages": each}) for each in messages))
    make(folder / "code", folder / "corpus", "--vocab-size", 300, "--holdout-every", 4)
    tokenizer = ["--tokenizer", folder / "code" / "tokenizer.json"]
    make(folder / "lines", lines, *tokenizer, "--holdout-every", 4)
    make(folder / "whole", lines, *tokenizer, "--holdout-every", 0)
    make(folder / "chat", chats, *tokenizer, "--chat", "--holdout-every", 4)
    paths = ["--data.path", folder / "code", folder / "lines"]
    paths += ["--data.validation", "chat", folder / "chat"]
    options = [*paths, "--train.validation-sequences", SEQUENCES, "--log.sample-tokens", 0]
    assert main(["train", str(config), "--run-dir", str(folder / "run"), *map(str, options)]) == 0
    return folder


def make(*arguments: object) -> None:
    assert main(["data", "make", *map(str, arguments), "--workers", "1"]) == 0


def evaluate(capsys: pytest.CaptureFixture[str], run: object, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    status = main(["eval", str(run), "--json", *map(str, arguments)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    result: dict[str, Any] = json.loads(captured.out)
    return result


def last_losses(run: Path) -> dict[str, float]:
    """Return the losses of the held-out sets at the run's last validation."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if "validation_loss" in row]
    return rows[-1].get("validation_losses", {"": rows[-1]["validation_loss"]})


def test_the_runs_own_sets_have_the_losses_of_its_validation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(capsys, folder / "run", "--max-sequences", SEQUENCES)
    expected = last_losses(folder / "run")
    assert list(result["sets"]) == ["code", "lines", "chat"] == list(expected)
    for name, loss in expected.items():
        assert result["sets"][name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result["sets"][name]["perplexity"] == pytest.approx(2.718281828**loss, rel=1e-4)
    assert result["step"] == 8
    assert result["sets"]["lines"]["sequences"] == SEQUENCES


def test_a_set_of_which_nothing_is_learned_has_no_loss(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others are evaluated, and the table has a dash."""
    unlearned = folder / "unlearned"
    shutil.copytree(folder / "chat", unlearned, dirs_exist_ok=True)
    for file in unlearned.glob("validation-*.learned.npy"):
        np.save(file, np.zeros_like(np.load(file)))
    sets = evaluate(capsys, folder / "run", folder / "lines", unlearned)["sets"]
    unknown = ("loss", "perplexity", "bits_per_byte", "accuracy")
    assert {sets["unlearned"][name] for name in unknown} == {None}
    assert sets["unlearned"]["tokens"] == 0
    assert sets["lines"]["loss"] > 0
    assert main(["eval", str(folder / "run"), str(unlearned)]) == 0
    captured = capsys.readouterr()
    assert "sequences is learned, so it has no loss: give another set or split" in captured.err


def test_all_sequences_are_counted_to_the_last_token_and_byte(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = evaluate(capsys, folder / "run", folder / "lines", "--batch-size", 5)["sets"]["lines"]
    dataset = DataSet(folder / "lines")
    split, reader = dataset.manifest.splits["validation"], dataset.split("validation")
    assert row["split"] == "validation"
    assert row["tokens"] == split.tokens - 1, "every token but the first is a label"
    first = Tokenizer.from_file(str(folder / "run" / "tokenizer.json")).decode(
        reader.tokens(0, 1).tolist()
    )
    assert row["bytes"] == split.text_bytes - len(first.encode())
    assert row["bits_per_byte"] == pytest.approx(
        row["loss"] * row["tokens"] / 0.6931471805599453 / row["bytes"]
    )
    assert 0 <= row["accuracy"] < 1


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (["--train.precision", "bf16", "--data.packing", "documents"], 5e-3),
        (["--train.precision", "fp64", "--data.packed-attention"], 1e-12),
    ],
    ids=["bf16", "fp64"],
)
def test_precision_and_packing_are_the_runs(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    tolerance: float,
) -> None:
    shutil.copytree(folder / "lines", tmp_path / "lines")
    arguments = ["--run-dir", tmp_path / "run", "--data.path", tmp_path / "lines"]
    arguments += ["--train.steps", 2, "--log.sample-tokens", 0, *options]
    assert main(["train", *map(str, [folder / "tiny.toml", *arguments])]) == 0
    (expected,) = last_losses(tmp_path / "run").values()
    row = evaluate(capsys, tmp_path / "run", "--max-sequences", 4)["sets"]["lines"]
    assert row["loss"] == pytest.approx(expected, rel=tolerance)
    assert row["data"] == str(tmp_path / "lines")


def test_batches_make_no_difference_and_context_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, longer = (
        evaluate(capsys, folder / "run", folder / "lines", *more)["sets"]["lines"]
        for more in (["--batch-size", 1], ["--batch-size", 64], ["--sequence-length", 48])
    )
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["tokens"] == longer["tokens"]
    assert abs(one["loss"] - longer["loss"]) > 1e-5


def test_of_conversations_only_answers_count(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (folder / "run", f"talk={folder / 'chat'}", "--split", "train")
    row = evaluate(capsys, *arguments)["sets"]["talk"]
    dataset = DataSet(folder / "chat")
    reader = dataset.split("train")
    learned = reader.learned(0, len(reader))
    tokenizer = Tokenizer.from_file(str(folder / "run" / "tokenizer.json"))
    answers = tokenizer.decode(reader.tokens(0, len(reader))[learned].tolist())
    assert row["tokens"] == learned.sum() < len(learned) / 2
    assert row["bytes"] == len(answers.encode())


def test_sets_have_names_and_splits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"{name}={folder / 'lines'}" for name in "ab"]
    sets = evaluate(capsys, folder / "run", folder / "whole", *named, "--max-sequences", 3)["sets"]
    splits = {name: row["split"] for name, row in sets.items()}
    assert splits == {"whole": "train", "a": "validation", "b": "validation"}
    assert sets["a"]["loss"] == sets["b"]["loss"]
    assert {row["sequences"] for row in sets.values()} == {3}


def test_a_checkpoint_can_be_chosen_and_results_are_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    (run / "evaluations.jsonl").unlink(missing_ok=True)
    names = (f"{run}{suffix}" for suffix in ("@4", "", "@best"))
    results = [evaluate(capsys, name, folder / "code") for name in names]
    assert [result["step"] for result in results] == [4, 8, 8]
    assert results[0]["sets"]["code"]["loss"] > results[1]["sets"]["code"]["loss"]
    assert read_rows(run / "evaluations.jsonl") == results


def test_the_table_shows_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = evaluate(capsys, folder / "run", folder / "code")["sets"]["code"]
    assert main(["eval", str(folder / "run"), str(folder / "code")]) == 0
    out = capsys.readouterr().out
    assert "step-00000008" in out
    for words in (
        "bits per byte",
        f"{row['loss']:.4f}",
        f"{row['bits_per_byte']:.4f}",
        f"{row['tokens']:,}",
        f"{row['accuracy']:.1%}",
    ):
        assert words in out


def test_a_set_of_bare_tokens_has_no_bytes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(400, dtype=np.uint16) % 300)
    numbers = ("--vocab-size", 300, "--end-token", 0, "--holdout-every", 0)
    make(tmp_path / "bare", tmp_path / "tokens.npy", *numbers)
    row = evaluate(capsys, folder / "run", tmp_path / "bare")["sets"]["bare"]
    assert (row["bytes"], row["bits_per_byte"]) == (None, None)
    assert row["tokens"] == len(DataSet(tmp_path / "bare").split("train")) - 1
    assert main(["eval", str(folder / "run"), str(tmp_path / "bare")]) == 0
    assert " - " in capsys.readouterr().out


def test_a_run_on_text_files_is_evaluated_on_what_was_made_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--run-dir", str(run), "--log.sample-tokens", "0"]
    assert main(["train", str(write_config(tmp_path, steps=2)), *options]) == 0
    (row,) = evaluate(capsys, run, "--max-sequences", 4)["sets"].values()
    assert [row["loss"]] == pytest.approx([*last_losses(run).values()], rel=1e-5)
    shutil.rmtree(tmp_path / "data")
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "no such data set" in capsys.readouterr().err


def test_an_imported_run_asks_for_data(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    text = (run / "config.toml").read_text()
    start = text.index("path = [")
    (run / "config.toml").write_text(text[:start] + text[text.index("]", start) + 2 :])
    (run / "provenance.json").unlink()
    assert main(["eval", str(run)]) == 2
    assert f"name data sets, as in lather eval {run} FOLDER" in capsys.readouterr().err


def test_without_the_harness_the_extra_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", str(folder / "run"), "--tasks", "hellaswag"]) == 2
    assert "pip install 'lather[lm-eval]'" in capsys.readouterr().err
