"""Data sets of a stand-in hub by address, with the real `huggingface_hub`."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making_helpers import lines, texts, texts_of

from lather.cli import main
from lather.config.toml_file import load_config
from lather.data.dataset import DataSet
from stand_in_hub import Hub, Stored, stand_in_hub
from tiny_run import timeless_rows, write_config


def records(seed: int) -> bytes:
    return lines(*({"text": text} for text in texts(12, seed))).encode()


def table(seed: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts(12, seed)}), buffer)
    return buffer.getvalue()


FILES = {
    "README.md": b"# Texts",
    ".gitattributes": b"*.parquet filter=lfs",
    "dataset_infos.json": b"{}",
    "data/train-00000-of-00002.parquet": table(0),
    "data/train-00001-of-00002.parquet": table(1),
    "data/test-00000-of-00001.parquet": table(2),
    "more/a.jsonl": records(3),
    "more/deep/b.jsonl.gz": gzip.compress(records(4)),
    "more/validation/c.jsonl": records(5),
    "more/contest.jsonl": records(6),
    "more/d.json": json.dumps([{"text": text} for text in texts(12, 7)]).encode(),
    "more/d.csv": b"text\nunread\n",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with stand_in_hub(tmp_path / "home") as hub:
        hub.add("dataset", "org/texts", FILES)
        yield hub


@pytest.fixture
def stored(hub: Hub) -> Stored:
    return hub.repositories["dataset", "org/texts"]


def made(*words: str) -> DataSet:
    command = ["data", "make", "out", *words, "--vocab-size", "300", "--holdout-every", "0"]
    assert main([*command, "--workers", "1"]) == 0
    return DataSet(Path("out"))


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["hf://org/texts"], [0, 1, 3, 6, 4]),
        (["hf://datasets/org/texts/data/*.parquet"], [2, 0, 1]),
        (["hf://datasets/org/texts/data/train-*"], [0, 1]),
        (["hf://datasets/org/texts/more"], [3, 6, 4, 5]),
        (["hf://datasets/org/texts/more/a.jsonl"], [3]),
        (["hf://org/texts/more/d.json"], [7]),
        (["hf://org/texts/more/", "--pattern", "*.jsonl"], [3, 6, 5]),
        (["hf://org/texts/data/train-*", "hf://org/texts/more/a.jsonl"], [0, 1, 3]),
    ],
)
def test_an_address_names_a_repository_a_folder_a_file_or_a_glob(
    words: list[str], seeds: list[int], hub: Hub
) -> None:
    assert texts_of(made(*words)) == [text for seed in seeds for text in texts(12, seed)]
    assert len(hub.downloads()) == len(seeds)


def test_the_files_that_are_left_out_are_counted_and_the_commit_is_kept(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = made("hf://org/texts", "--validation", "hf://org/texts/data/test-*")
    commit = stored.refs["main"]
    assert dataset.manifest.made_from["left_out"] == {"file of another split than train": 2}
    recipe = dataset.manifest.made_from["recipe"]
    assert recipe["sources"] == [f"hf://datasets/org/texts@{commit}"]
    assert recipe["validation"] == [f"hf://datasets/org/texts@{commit}/data/test-*"]
    assert texts_of(dataset, "validation") == texts(12, 2)
    assert "2 x file of another split than train" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("source", "message"),
    {
        "hf://org/none": "hf://datasets/org/none: there is no such dataset, or it is private",
        "hf://org/texts@v9/data": "has no revision 'v9'",
        "hf://org/texts/nothing/*": "no file of text records matches: the repository has 3 .p",
        "hf://models/org/texts": "not the address of a dataset: it must be like hf://datasets/ORG/",
        "hf://../texts": "hf://../texts: not the address of a dataset",
        "hf://texts": "hf://texts: not the address of a dataset",
    }.items(),
)
def test_what_cannot_be_read_is_one_line(
    source: str, message: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "make", "out", source, "--vocab-size", "300"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("out").exists()


def test_a_run_reads_the_same_commit_at_every_start(
    hub: Hub, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stored.refs["main"]
    config = str(write_config(Path(), steps=2))
    train = ["train", config, "--data.source", "hf://org/texts/data", "--run-dir"]
    train[2:2] = ["--optim.schedule", "constant"]
    assert main([*train, "whole", "--train.steps", "4"]) == 0
    assert main([*train, "parts"]) == 0
    recorded = load_config(Path("parts/config.toml")).data
    assert (recorded.source, recorded.revision) == ("hf://org/texts/data", first)
    second = stored.commit({**FILES, "data/new.parquet": table(9)})

    shutil.rmtree(tmp_path / "home")
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main([*train, "parts", "--train.steps", "3"]) == 0
    assert main(["train", "parts", "--train.steps", "4"]) == 0
    parts, whole = (
        [row["loss"] for row in timeless_rows(Path(name)) if "loss" in row]
        for name in ("parts", "whole")
    )
    assert parts == whole
    assert len(whole) == 4
    assert not hub.requests

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    shutil.rmtree("data")
    assert main(["train", "parts", "--train.steps", "5"]) == 0
    assert load_config(Path("parts/config.toml")).data.revision == first
    assert main([*train, "new"]) == 0
    assert load_config(Path("new/config.toml")).data.revision == second


def test_another_revision_is_refused_as_other_tokens(
    hub: Hub, stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.commit({**FILES, "data/new.parquet": table(9)}, "v2")
    train = ["train", str(write_config(Path(), steps=1)), "--run-dir", "run"]
    assert main([*train, "--data.source", "hf://org/texts/data"]) == 0
    words = [*train, "--train.steps", "2", "--data.source"]
    assert main([*words, "hf://org/texts@v2/data"]) == 2
    assert "was trained on other tokens" in capsys.readouterr().err
    assert main([*words[:-1], "--data.revision", "v2"]) == 2
    assert "data.revision = 'v2' is not valid: it must be a commit" in capsys.readouterr().err
