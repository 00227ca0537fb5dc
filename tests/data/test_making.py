"""Making data sets of texts: every document is there once, interruptions do not change the bytes,
and nothing is left out silently."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making_helpers import WORDS, Make, contents, lines, texts, texts_of, write_jsonl

from forked import ForkedPython, fresh_python
from lather.data import making, sources, work
from lather.data.dataset import DataSet
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.making import make_dataset
from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.errors import DataError
from lather.formats import DATA_SET


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units hold a few documents."""
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 1000)
    monkeypatch.setattr(sources, "RANGE_BYTES", 1000)


# --- formats --------------------------------------------------------------------------------------


def as_zstd(folder: Path, documents: list[str]) -> Path:
    """Compress documents into two frames one after the other, as parallel compressors do."""
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    plain = write_jsonl(folder / "plain", documents).read_bytes()
    frames = compressor.compress(plain[:1000]) + compressor.compress(plain[1000:])
    return write(folder / "some.jsonl.zst", frames)


def as_parquet(folder: Path, documents: list[str]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"number": list(range(len(documents))), "text": documents})
    parquet.write_table(table, folder / "some.parquet", row_group_size=17)
    return folder / "some.parquet"


def as_saved_dataset(folder: Path, documents: list[str]) -> Path:
    datasets = pytest.importorskip("datasets")
    columns = {"text": documents, "number": list(range(len(documents)))}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(documents: list[str]) -> list[dict[str, str]]:
    return [{"text": document} for document in documents]


FORMATS: dict[str, Callable[[Path, list[str]], Path]] = {
    "jsonl": lambda folder, texts: write_jsonl(folder / "some.jsonl", texts),
    "jsonl.gz": lambda folder, texts: write(
        folder / "some.jsonl.gz", gzip.compress(lines(*rows_of(texts)).encode())
    ),
    "jsonl.zst": as_zstd,
    "json": lambda folder, texts: write(folder / "some.json", json.dumps(rows_of(texts), indent=1)),
    "lines named json": lambda folder, texts: write_jsonl(folder / "some.json", texts),
    "parquet": as_parquet,
    "datasets": as_saved_dataset,
    "separated": lambda folder, texts: write(folder / "some.txt", END_OF_TEXT.join(texts)),
}


@pytest.mark.parametrize("unit_bytes", [500, 1 << 25])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_every_document_once_and_in_order(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, unit_bytes: int
) -> None:
    """This holds also where files are read in parts: units of 500 bytes hold a few documents
    each."""
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(sources, "RANGE_BYTES", min(unit_bytes, sources.RANGE_BYTES))
    documents, separator = texts(200), END_OF_TEXT if kind == "separated" else ""
    dataset = make(FORMATS[kind](tmp_path, documents), separator=separator)
    split = dataset.manifest.splits["train"]
    assert texts_of(dataset) == documents
    assert split.text_bytes == sum(len(text.encode()) for text in documents)
    if unit_bytes == 500 and kind in ("jsonl", "parquet", "datasets", "separated"):
        assert len(split.shards) > 5


def test_a_hub_style_dictionary_of_splits_names_the_split(make: Make, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {
        name: datasets.Dataset.from_dict({"text": texts(3, seed)})
        for seed, name in enumerate(("a", "b"))
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"has the splits a, b: name one, as in .*saved#a"):
        make(tmp_path / "saved")
    assert texts_of(make(Path(f"{tmp_path / 'saved'}#b"))) == texts(3, 1)


def test_text_files_are_documents_and_large_ones_several(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    long = "".join(f"line {number}\n" for number in range(250_000))
    for name, text in {"a.txt": "first\n", "b/c.txt": long, "b.txt": "last"}.items():
        (folder / name).write_text(text)
    found = texts_of(make(folder))
    pieces = [text for text in found if text.startswith("line")]
    assert sorted(set(found) - set(pieces)) == ["first\n", "last"]
    assert len(pieces) == 3
    assert "".join(pieces) == long
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_document_much_longer_than_what_is_encoded_at_once(make: Make, tmp_path: Path) -> None:
    text = " ".join(random.Random(0).choices(WORDS, k=400_000))
    dataset = make(write_jsonl(tmp_path / "a.jsonl", ["short", text, "short too"]))
    assert texts_of(dataset) == ["short", text, "short too"]


def test_shards_end_with_documents(make: Make, tmp_path: Path) -> None:
    dataset = make(write_jsonl(tmp_path / "a.jsonl", texts(300)), shard_tokens=500)
    shards = dataset.manifest.splits["train"].shards
    assert len(shards) > 10
    assert all(500 <= shard.tokens < 700 for shard in shards[:-1])
    for shard in shards:
        tokens = np.load(dataset.folder / f"{shard.name}.npy", mmap_mode="r")
        ends = np.load(dataset.folder / f"{shard.name}.ends.npy", mmap_mode="r")
        assert tokens.dtype == np.uint16
        assert len(tokens) == ends[-1] == shard.tokens
        assert (np.flatnonzero(tokens == dataset.manifest.end_token) + 1).tolist() == ends.tolist()
    assert texts_of(dataset) == texts(300)


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "every", "expected"), [(2, 20, 1), (3, 20, 1), (40, 20, 2), (200, 7, 28)]
)
def test_one_document_in_so_many_is_held_out(
    make: Make, tmp_path: Path, count: int, every: int, expected: int
) -> None:
    dataset = make(write_jsonl(tmp_path / "a.jsonl", texts(count)), holdout_every=every)
    held_out = texts_of(dataset, "validation")
    assert abs(len(held_out) - expected) <= 1 <= len(held_out)
    assert sorted([*texts_of(dataset), *held_out]) == sorted(texts(count))


@pytest.mark.usefixtures("small_units")
def test_units_hold_out_different_places(make: Make, tmp_path: Path) -> None:
    """Units hold about 8 documents, of which one in 20 is held out."""
    dataset = make(write_jsonl(tmp_path / "a.jsonl", texts(2000)), holdout_every=20)
    assert 60 < dataset.manifest.splits["validation"].documents < 140


def test_sources_for_validation_are_held_out_as_a_whole(make: Make, tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", texts(30))
    held_out = write_jsonl(tmp_path / "b.jsonl", texts(9, 1))
    dataset = make(train, validation=(str(held_out),), holdout_every=20)
    assert texts_of(dataset) == texts(30)
    assert texts_of(dataset, "validation") == texts(9, 1)


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_units")
def test_processes_make_no_difference(make: Make, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(400))
    one, three = (
        make(source, name=f"with-{workers}", workers=workers, holdout_every=10)
        for workers in (1, 3)
    )
    assert len(one.manifest.splits["train"].shards) > 4
    assert contents(one.folder) == contents(three.folder)
    assert not list(tmp_path.glob("*.partial"))


COMMAND = """
import sys
from lather.data import sources
sources.LEAST_UNIT_BYTES = sources.RANGE_BYTES = 6000
from lather.cli import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start `lather` with units of 6,000 bytes, forked or in a process of its own."""
    script = tmp_path / "units.py"
    script.write_text(COMMAND)

    def start(*arguments: object, python: Start = ForkedPython) -> subprocess.Popen[str]:
        environment = {**os.environ, "COLUMNS": "200"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return python([script, *arguments], env=environment, start_new_session=True, **streams)

    return start


MANY = [pytest.param(workers, 10, marks=pytest.mark.grid) for workers in (1, 2)]


@pytest.mark.parametrize(("workers", "num_kills"), [(1, 2), (2, 4), *MANY])
def test_kills_at_random_moments_change_nothing(
    tmp_path: Path, tokenizer: Path, start: Start, workers: int, num_kills: int
) -> None:
    """Kills are of the whole group, or of the parent alone, whose child processes then end by
    themselves."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(1500))
    options = ["--tokenizer", tokenizer, "--workers", workers, "--holdout-every", 10]
    undisturbed = start("data", "make", tmp_path / "undisturbed", source, *options)
    start_time = time.monotonic()
    assert undisturbed.communicate(timeout=120)
    seconds = time.monotonic() - start_time
    assert undisturbed.returncode == 0
    draw, kills = random.Random(workers), 0
    while kills < num_kills:
        process = start("data", "make", tmp_path / "killed", source, *options)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.2, 0.9) * seconds)
        if process.poll() is None:
            kills += 1
            kill = os.killpg if draw.random() < 0.5 else os.kill
            kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        if kills < num_kills:
            # it had finished before the kill
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)
    last = start("data", "make", tmp_path / "killed", source, *options)
    out, _ = last.communicate(timeout=120)
    # the last kill came after the folder had its name
    assert last.returncode == 0 or "exists already" in out, out
    mine, theirs = contents(tmp_path / "killed"), contents(tmp_path / "undisturbed")
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name] != theirs[name]] == []
    assert DataSet(tmp_path / "killed").check() == []


def children(process: int) -> list[int]:
    return [
        int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_process_that_dies_is_an_error_and_the_same_command_goes_on(
    tmp_path: Path, tokenizer: Path, start: Start
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20_000))
    command = ["data", "make", tmp_path / "ours", source, "--tokenizer", tokenizer]
    command += ["--workers", 2, "--holdout-every", 0]
    process = start(*command, python=fresh_python)
    units = tmp_path / "ours.partial" / "units"
    while process.poll() is None and not any(units.glob("0*.json")):
        time.sleep(0.01)
    workers = [
        child
        for child in children(process.pid)
        if b"multiprocessing.spawn" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2, out
    assert f"a process ended while it was at work on {source}: it was killed" in " ".join(
        out.split()
    )
    last = start(*command)
    out, _ = last.communicate(timeout=120)
    assert last.returncode == 0, out
    assert "continuing: " in out
    assert texts_of(DataSet(tmp_path / "ours")) == texts(20_000)


def test_half_a_unit_beside_an_old_report_is_done_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start is killed before it deletes its reports, and its data set is deleted; a second
    one is killed within a shard."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    with monkeypatch.context() as patch:
        patch.setattr(making.shutil, "rmtree", lambda *_, **__: None)
        whole = contents(make(source).folder)
    shutil.rmtree(tmp_path / "ours")
    with monkeypatch.context() as patch:
        patch.setattr(work.ShardWriter, "finish", lambda _: 1 / 0)
        patch.setattr(work.ShardWriter, "abandon", lambda _: None)
        with pytest.raises(ZeroDivisionError):
            make(source)
    assert contents(make(source).folder) == whole


@pytest.fixture
def interrupted(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Begin to make a data set, which is interrupted before its first unit."""

    def begin(*sources: Path, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(making, "do_units", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                make(*sources, **options)

    return begin


def refused(make: Make, *sources: Path, **options: Any) -> None:
    fault = "ours.partial was started with other options, or its sources have changed since: delete"
    with pytest.raises(DataError, match=fault):
        make(*sources, **options)


def test_other_options_or_sources_after_an_interruption_are_refused_with_the_remedy(
    make: Make, tmp_path: Path, interrupted: Callable[..., None]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    interrupted(source)
    refused(make, source, holdout_every=5)
    plan = tmp_path / "ours.partial/plan.json"
    text = plan.read_text()
    plan.write_text(text.replace(f'"format": {DATA_SET.number}', '"format": 2'))
    refused(make, source)
    plan.write_text(text)
    write_jsonl(source, texts(21))
    refused(make, source)
    shutil.rmtree(tmp_path / "ours.partial")
    assert texts_of(make(source)) == texts(21)


def test_another_tokenizer_or_template_after_an_interruption_is_refused(
    make: Make, tmp_path: Path, tokenizer: Path, interrupted: Callable[..., None]
) -> None:
    model, source = tmp_path / "model", tmp_path / "chats.jsonl"
    model.mkdir()
    shutil.copyfile(tokenizer, model / "tokenizer.json")
    source.write_text(lines({"prompt": "a", "completion": "b"}))
    options = {"tokenizer": str(model), "chat": True}
    interrupted(source, **options)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    refused(make, source, **options)
    train_tokenizer(iter(["others"]), 290, END_OF_TEXT).save(str(model / "tokenizer.json"))
    refused(make, source, **options)
    shutil.rmtree(tmp_path / "ours.partial")
    dataset = make(source, **options)
    assert dataset.manifest.made_from["chat_template"] == template
    expected = {"name": "chats.jsonl", "kind": "jsonl", "bytes": source.stat().st_size}
    assert json.loads((dataset.folder / "files.jsonl").read_text()) == expected


def test_other_options_may_follow_where_no_document_could_be_used(
    make: Make, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(lines(*({"body": text} for text in texts(20))))
    fault = r"20 x no field 'text'.*skipped\.jsonl has every file and line; --field NAME takes"
    for _ in range(2):
        with pytest.raises(DataError, match=fault):
            make(source)
    assert (tmp_path / "ours.partial/dataset/skipped.jsonl").exists()
    dataset = make(source, field="body")
    assert texts_of(dataset) == texts(20)
    assert not (tmp_path / "ours.partial").exists()
    other = make(source, field="body", name="b")
    assert contents(dataset.folder).keys() == contents(other.folder).keys()


def test_a_folder_of_data_sets_is_not_told_to_be_deleted(make: Make, tmp_path: Path) -> None:
    make(write_jsonl(tmp_path / "a.jsonl", texts(5)))
    with pytest.raises(
        DataError, match=r"not a data set, but a folder of data sets: give one, such as .*ours$"
    ):
        DataSet(tmp_path)


def test_a_folder_that_is_there_is_left_alone(make: Make, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "precious").write_text("mine")
    with pytest.raises(DataError, match="ours exists already: give another folder, or delete it"):
        make(write_jsonl(tmp_path / "a.jsonl", texts(5)))
    assert (tmp_path / "ours" / "precious").read_text() == "mine"


def test_what_is_left_of_a_finished_making_does_not_count_as_done(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The making is killed, as it were, after the data set is in place; then the data set is
    deleted."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(50))
    monkeypatch.setattr(making.shutil, "rmtree", lambda *_, **__: None)
    first = contents(make(source).folder)
    monkeypatch.undo()
    assert (tmp_path / "ours.partial" / "units" / "00000.json").exists()
    assert contents(make(source).folder) == first
    assert not (tmp_path / "ours.partial").exists()
    shutil.rmtree(tmp_path / "ours")
    assert contents(make(source).folder) == first


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(
    make: Make, tmp_path: Path, tokenizer: Path
) -> None:
    other = load_tokenizer(tokenizer, "")
    other.enable_truncation(4)
    other.enable_padding(length=9)
    other.save(str(tmp_path / "tokenizer.json"))
    dataset = make(
        write_jsonl(tmp_path / "a.jsonl", texts(20)), tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert texts_of(dataset) == texts(20)


@pytest.mark.parametrize("encoding", ["utf-16", "utf_16_le", "cp037", "utf-32"])
def test_large_files_whose_line_ends_are_no_single_bytes_are_read_whole(
    make: Make, tmp_path: Path, encoding: str
) -> None:
    text = "".join(f"line {number}\n" for number in range(90_000))
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    given = "auto" if encoding in ("utf-16", "utf-32") else encoding
    assert texts_of(make(tmp_path / "a.txt", encoding=given)) == [text]
    separated = make(tmp_path / "a.txt", name="separated", encoding=given, separator="line 70000\n")
    assert texts_of(separated) == text.split("line 70000\n")


def test_an_end_of_text_that_the_texts_spell_is_refused(tmp_path: Path) -> None:
    """Byte-level BPE would give its characters in a text the same token."""
    for name in "ab":
        (tmp_path / name).write_text("the end of the text, the very end")
    recipe = DataRecipe((str(tmp_path),), vocab_size=300, end_of_text="the")
    with pytest.raises(DataError, match=r"^end_of_text = 'the' is also a token of the texts: give"):
        make_dataset(tmp_path / "made", recipe, print, workers=1)
    made = make_dataset(tmp_path / "made", replace(recipe, end_of_text="<the>"), print, workers=1)
    assert made.manifest.end_token == 0
