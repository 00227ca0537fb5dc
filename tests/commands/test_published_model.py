"""Commands that take a Hugging Face folder as they take a run: the results of the imported folder,
and nothing written into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lather.cli import main
from lather.commands import eval as command
from lather.train.published_model import find_model
from tiny_run import write_config

Printed = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, `model`, in bf16, whose tokenizer ends answers with a token of its own, and the run
    that is imported from it."""
    folder = tmp_path_factory.mktemp("published")
    run, options = (
        folder / "trained",
        ["--log.sample-tokens", "0", "--moe.balance-coefficient", "0"],
    )
    config = str(write_config(folder, steps=4))
    assert main(["train", config, "--run-dir", str(run), *options]) == 0
    assert main(["export", str(run), str(folder / "model")]) == 0
    settings = folder / "model/generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [0, 98]}))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "model/chat_template.jinja").write_text(template)
    assert main(["import", str(folder / "model"), str(folder / "run")]) == 0
    return folder


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def run(*arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main(list(map(str, arguments))) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def test_evaluations_are_those_of_the_imported_run(folder: Path, printed: Printed) -> None:
    (data,) = (folder / "data").iterdir()
    before = sorted((folder / "model").iterdir())

    def scores(name: str, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            printed("eval", folder / name, data, "--json", "--sequence-length", 16, *options)
        )
        return found["sets"][data.name]

    expected = scores("run")
    for layerwise in ("never", "always"):
        assert scores("model", "--layerwise", layerwise) == expected
    assert scores("model", "--dtype", "bf16") != expected
    in_bf16 = scores("run", "--dtype", "bf16")
    assert scores("model", "--dtype", "bf16", "--layerwise", "always") == in_bf16
    assert in_bf16["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    assert sorted((folder / "model").iterdir()) == before
    assert (folder / "run/evaluations.jsonl").exists()


@pytest.mark.parametrize("words", [["--prompt", "def f"], ["--message", "hi", "--seed", "3"]])
def test_texts_are_those_of_the_imported_run(
    words: list[str], folder: Path, printed: Printed
) -> None:
    options = [*words, "--tokens", "24", "--json"]
    expected = printed("generate", folder / "run", *options)
    assert printed("generate", folder / "model", *options) == expected
    assert printed("generate", folder / "model", *options, "--layerwise", "always") == expected


def test_scores_are_those_of_the_imported_run(folder: Path, printed: Printed) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text('{"tokens": [5, 6, 7]}\n{"tokens": [1, 2, 3, 4]}\n')
    for name in ("run", "model"):
        printed("score", folder / name, rows, folder / f"{name}.jsonl", "--routing")
    assert (folder / "run.jsonl").read_text() == (folder / "model.jsonl").read_text()


def test_a_text_may_fill_the_models_positions(folder: Path, tmp_path: Path) -> None:
    for positions, context, length in ((64, 64, 64), (512, 512, 256), (10**5, 4096, 256)):
        shutil.copytree(folder / "model", tmp_path / str(positions))
        file = tmp_path / str(positions) / "config.json"
        settings = json.loads(file.read_text()) | {"max_position_embeddings": positions}
        file.write_text(json.dumps(settings))
        model = find_model(str(file.parent))
        assert model.context(0) == context
        assert model.context(48) == 48
        assert model.config.train.sequence_length == length, "of held-out sets and of an import"


def test_tasks_read_longer_texts_than_held_out_sets(
    folder: Path, tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 512}))
    contexts: list[int] = []

    def prepare(trained: object, tasks: object, parsed: object, context: int) -> object:
        contexts.append(context)
        return dict

    monkeypatch.setattr(command, "_prepare_tasks", prepare)
    (data,) = (folder / "data").iterdir()
    words = ["eval", file.parent, data, "--json", "--tasks", "arc_easy", "--max-sequences", 1]
    assert json.loads(printed(*words))["sequence_length"] == 256
    assert json.loads(printed(*words, "--sequence-length", 32))["sequence_length"] == 32
    assert contexts == [512, 32]


def test_what_a_folder_lacks_is_one_line(folder: Path, tmp_path: Path, printed: Printed) -> None:
    model, text = folder / "model", ["--prompt", "x"]
    line = printed("generate", model, *text, "--step", 3, status=2)
    assert "--step 3 applies to runs, and" in line
    line = printed("generate", model, *text, "--weights", "average", status=2)
    assert "--weights average applies to runs, and" in line
    line = printed("eval", model, status=2)
    assert f"name data sets, as in lather eval {model} FOLDER" in line
    shutil.copytree(model, tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    line = printed("generate", tmp_path / "bare", *text, status=2)
    assert line.strip().endswith("put the model's own into the folder")
    (tmp_path / "bare/model.safetensors").unlink()
    (data,) = (folder / "data").iterdir()
    line = printed("eval", tmp_path / "bare", data, status=2)
    assert "holds neither model.safetensors nor" in line
