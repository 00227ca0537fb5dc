"""`lather data` as a user gives it: what it prints, errors in one line, and a training on its data
sets."""

import json
from pathlib import Path

import pytest

from lather.cli import main
from lather.data.dataset import DataSet
from tiny_run import run, timeless_rows, write_config


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    lines = [
        json.dumps({"text": f"def f{number}(x):\n    return x + {number}\n" * 5})
        for number in range(60)
    ]
    path.write_text("\n".join([*lines, "{broken", '{"other": 1}']))
    return path


def test_make_show_and_check(
    tmp_path: Path, jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ours"
    assert main(["data", "make", str(folder), str(jsonl), "--vocab-size", "300"]) == 0
    made = capsys.readouterr().out
    assert "tokenizer: byte-level BPE of 300 tokens" in made
    assert "57 documents" in made
    assert "tokens/s" in made
    assert main(["data", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "train        57 documents",
        "validation   3 documents",
        "not taken    1 x broken JSON, 1 x no field 'text'",
        str(jsonl),
    ):
        assert words in shown
        assert words in made
    assert main(["data", "check", str(folder)]) == 0
    assert (
        f"{folder} is as it was made ({DataSet(folder).manifest.identity})"
        in capsys.readouterr().out
    )
    shard = next(folder.glob("train-*.npy"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert main(["data", "check", str(folder)]) == 2
    assert f"{shard}: its checksum is " in capsys.readouterr().err


BAD = {
    "no command": (["data", "mend"], "unknown command data 'mend': use one of make, show, check"),
    "no source": (
        ["data", "make", "{folder}/ours"],
        "SOURCE [SOURCE ...] is missing: Files, folders, python-stdlib",
    ),
    "absent source": (
        ["data", "make", "{folder}/ours", "{folder}/absent"],
        "absent: no such file or folder",
    ),
    "unknown option": (
        ["data", "make", "{folder}/ours", "{folder}", "--tokeniser", "x"],
        "did you mean --tokenizer",
    ),
    "no data set": (
        ["data", "show", "{folder}/absent"],
        "absent: no such data set: make it with `lather data make",
    ),
    "format": (["data", "make", "{folder}/ours", "{folder}", "--format", "csv"], "csv"),
    "workers": (
        ["data", "make", "{folder}/ours", "{folder}", "--workers", "-1"],
        "--workers = -1 is not valid",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = BAD[case]
    assert main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error
    assert not (tmp_path / "ours").exists()


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    assert "make FOLDER SOURCE" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main(["data", "make", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    for option in ("--separator", "--chat", "--holdout-every", "--token-dtype", "--workers"):
        assert option in out


def test_a_run_on_two_data_sets_with_weights_and_further_held_out_sets(
    tmp_path: Path, jsonl: Path
) -> None:
    config = write_config(tmp_path, steps=6)
    tokenizer = tmp_path / "code" / "tokenizer.json"
    for name, source, more in (
        ("code", tmp_path / "corpus", ["--vocab-size", 300]),
        ("lines", jsonl, ["--tokenizer", tokenizer]),
    ):
        status, _, err = run(
            "data", "make", tmp_path / name, source, "--holdout-every", 4, "--workers", 1, *more
        )
        assert status == 0, err
    paths = ["--data.path", tmp_path / "code", tmp_path / "lines"]
    options = [
        *paths,
        "--data.weights",
        3,
        1,
        "--data.validation",
        "again",
        tmp_path / "lines",
        "--data.packing",
        "documents",
    ]
    status, out, err = run("train", config, "--run-dir", tmp_path / "run", *options)
    assert status == 0, err
    rows = [row for row in timeless_rows(tmp_path / "run") if "validation_loss" in row]
    assert list(rows[-1]["validation_losses"]) == ["code", "lines", "again"]
    assert rows[-1]["validation_losses"]["lines"] == rows[-1]["validation_losses"]["again"]
    assert (
        rows[-1]["validation_loss"]
        == rows[-1]["validation_losses"]["code"]
        < rows[0]["validation_loss"]
    )
    assert "(code " in out
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert [identity for _, identity in record["data"]] == [
        DataSet(tmp_path / name).manifest.identity for name in ("code", "lines")
    ]
