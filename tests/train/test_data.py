"""From text to batches: the same text always gives the same tokens in the same order, and damage is reported by file name."""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lather.errors import DataError
from lather.train import data as data_module
from lather.train.config import Config, DataConfig
from lather.train.data import (
    END_OF_TEXT,
    SPLITS,
    Batches,
    Document,
    TokenShards,
    load_tokenizer,
    prepare,
    read_corpus,
    split_corpus,
    train_tokenizer,
)


def quiet(text: str) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards_of(folder: Path, split: str) -> list[np.ndarray]:
    return [np.load(folder / entry["file"]) for entry in json.loads((folder / "dataset.json").read_text())["splits"][split]]


def counting(*sizes: int) -> list[np.ndarray]:
    """Shards that count on from 0, so that every token names its place."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end, dtype=np.uint16) for size, end in zip(sizes, ends, strict=True)]


# --- corpus and split ---------------------------------------------------------------------------------------------------------------


def test_the_standard_library_is_taken_without_tests_and_other_packages() -> None:
    documents = read_corpus(DataConfig())
    folders = {part for document in documents for part in document.name.split("/")[:-1]}
    names = [document.name for document in documents]
    assert len(documents) > 200
    assert "argparse.py" in names
    assert names == sorted(names)
    assert folders.isdisjoint({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def test_files_in_sub_folders_are_read_and_what_is_no_text_is_left_out(config: Config, corpus: Path) -> None:
    (corpus / "empty.txt").touch()
    (corpus / "blank.txt").write_text(" \n")
    (corpus / "other.md").write_text("not asked for")
    (corpus / "folder.txt").mkdir()
    (corpus / "binary.txt").write_bytes(b"\x80\x81\xff\x00\xfe")
    assert [document.name for document in read_corpus(config.data)] == [f"{n}.txt" for n in (0, 1, 2, 3, 4, 6, 7)] + ["more/5.txt"]


def test_the_files_of_an_installed_package(config: Config) -> None:
    import rich

    documents = read_corpus(replace(config.data, source="package:rich", pattern="*.py"))
    here = Path(rich.__file__).parent
    files = {path.relative_to(here).as_posix() for path in here.rglob("*.py") if path.read_text("utf-8").strip()}
    assert {document.name for document in documents} == files
    assert next(document.text for document in documents if document.name == "console.py") == (here / "console.py").read_text("utf-8")


@given(st.integers(2, 60), st.integers(2, 80))
@example(2, 2)
@example(2, 80)
@settings(deadline=None, max_examples=60)
def test_every_document_is_either_trained_on_or_held_out(num_documents: int, holdout_every: int) -> None:
    documents = [Document(str(index), "text") for index in range(num_documents)]
    split = split_corpus(documents, holdout_every)
    assert sorted([*split["train"], *split["validation"]], key=documents.index) == documents
    assert len(split["validation"]) >= max(1, num_documents // holdout_every)
    assert len(split["train"]) >= 1


# --- preparation --------------------------------------------------------------------------------------------------------------------


def test_the_same_corpus_gives_the_same_folder_name_and_bytes(config: Config, tmp_path: Path) -> None:
    first, second = (prepare(replace(config.data, cache_dir=str(tmp_path / name)), 300, quiet) for name in "ab")
    assert first.name == second.name
    assert contents(first) == contents(second)


def test_a_prepared_corpus_is_not_made_again(config: Config, dataset: Path) -> None:
    def report(text: str) -> None:
        raise AssertionError(text)

    assert prepare(config.data, config.model.vocab_size, report) == dataset


@pytest.mark.parametrize("change", ["text", "name", "vocabulary", "holdout", "shards"])
def test_anything_else_gives_another_folder(config: Config, corpus: Path, dataset: Path, change: str) -> None:
    data, vocab_size = config.data, config.model.vocab_size
    if change == "text":
        (corpus / "1.txt").write_text((corpus / "1.txt").read_text("utf-8")[:-1] + "!", "utf-8")
    elif change == "name":
        (corpus / "1.txt").rename(corpus / "1b.txt")
    elif change == "vocabulary":
        vocab_size += 1
    else:
        data = replace(data, **{"holdout": {"holdout_every": 3}, "shards": {"shard_tokens": 999}}[change])
    other = prepare(data, vocab_size, quiet)
    assert other != dataset
    assert other.parent == dataset.parent


@pytest.mark.parametrize("shard_tokens", [7, 100, 10**6])
def test_the_shards_decode_to_the_documents_in_order(config: Config, shard_tokens: int) -> None:
    data = replace(config.data, shard_tokens=shard_tokens)
    folder = prepare(data, config.model.vocab_size, quiet)
    tokenizer = load_tokenizer(folder / "tokenizer.json", "")
    for split, documents in split_corpus(read_corpus(data), data.holdout_every).items():
        shards = shards_of(folder, split)
        assert [len(shard) for shard in shards[:-1]] == [shard_tokens] * (len(shards) - 1)
        assert 0 < len(shards[-1]) <= shard_tokens
        texts = tokenizer.decode(np.concatenate(shards).tolist(), skip_special_tokens=False).split(END_OF_TEXT)
        assert texts == [*(document.text for document in documents), ""]


def test_two_files_are_enough(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 40)
    folder = prepare(DataConfig(source=str(tmp_path), pattern="*.txt", cache_dir=str(tmp_path / "cache")), 300, quiet)
    assert all(len(TokenShards(folder, split, 4)) for split in SPLITS)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["tokenizer", "encoding", "first shard", "last shard", "index"])
def test_an_interrupted_preparation_leaves_nothing_and_is_repeated(
    config: Config, monkeypatch: pytest.MonkeyPatch, place: str, kind: type[BaseException]
) -> None:
    def fail(*args: Any) -> None:
        calls.append(place)
        if place != "last shard" or len(calls) == 2:
            raise kind
        save(*args)

    calls, save = [], np.save
    patches: dict[str, tuple[Any, str]] = {
        "tokenizer": (data_module, "train_tokenizer"),
        "encoding": (data_module, "_write_shards"),
        "first shard": (np, "save"),
        "last shard": (np, "save"),
        "index": (Path, "write_text"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*patches[place], fail)
        with pytest.raises(kind):
            prepare(config.data, config.model.vocab_size, quiet)
    assert list(Path(config.data.cache_dir).iterdir()) == []
    folder = prepare(config.data, config.model.vocab_size, quiet)
    assert list(Path(config.data.cache_dir).iterdir()) == [folder]
    assert TokenShards(folder, "train", 16)


def test_two_processes_may_prepare_the_same_corpus(config: Config) -> None:
    """The other one is done while this one is at work."""
    done: list[Path] = []

    def report(text: str) -> None:
        if not done:
            done.append(prepare(config.data, config.model.vocab_size, quiet))

    assert prepare(config.data, config.model.vocab_size, report) == done[0]
    assert list(done[0].parent.iterdir()) == done


TOKENIZER = train_tokenizer(iter(["the quick brown fox " * 9]), 300)


@given(st.text())
@example("")
@example("\r\n\t\0  \ufeffe\u0301\U0001f98a")
@settings(deadline=None, max_examples=150)
def test_any_text_encodes_and_decodes_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.token_to_id(END_OF_TEXT) not in ids


def test_a_document_that_spells_the_end_of_text_token_is_one_document(config: Config, corpus: Path) -> None:
    text = f"before {END_OF_TEXT} after " * 5
    for path in corpus.rglob("*.txt"):
        path.write_text(text)
    folder = prepare(config.data, config.model.vocab_size, quiet)
    tokenizer = load_tokenizer(folder / "tokenizer.json", "")
    tokens = np.concatenate(shards_of(folder, "train"))
    assert (tokens == tokenizer.token_to_id(END_OF_TEXT)).sum() == 6  # of eight documents two are held out
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("contents", [None, b"{", b"\xff\xfe"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(DataError, match=f"^{path}: "):
        load_tokenizer(path, "put it back")


@pytest.mark.parametrize("sizes", [(41,), (40, 41, 42), (9, 5, 4, 1, 13)])
def test_windows_overlap_by_one_token_and_never_cross_a_shard(hand_made: Callable[..., Path], sizes: tuple[int, ...]) -> None:
    arrays, window = counting(*sizes), 4
    shards = TokenShards(hand_made(*arrays), "train", window)
    expected = [array[s : s + window + 1] for array in arrays for s in range(0, len(array) - window, window)]
    assert len(shards) == len(expected)
    np.testing.assert_array_equal(shards.windows(range(len(shards)), 60000).numpy(), np.stack(expected))


@pytest.mark.parametrize("batch_size", [1, 4, 5, 30])
def test_every_window_comes_once_per_epoch_each_time_in_another_order(hand_made: Callable[..., Path], batch_size: int) -> None:
    shards = TokenShards(hand_made(*counting(40, 41, 42)), "train", 8)
    n, batches = len(shards), Batches(shards, batch_size, 0, 60000)
    firsts = [int(row[0]) for step in range(1, 3 * n + 1) for row in batches.batch(step)]
    epochs = [firsts[index * n : (index + 1) * n] for index in range(3)]
    assert all(sorted(epoch) == sorted(int(first) for first in shards.windows(range(n), 60000)[:, 0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_another_seed_gives_another_order(hand_made: Callable[..., Path]) -> None:
    shards = TokenShards(hand_made(*counting(200)), "train", 8)
    first, same, other = (Batches(shards, len(shards), seed, 60000).batch(1) for seed in (0, 0, 1))
    assert first.equal(same)
    assert not first.equal(other)


def test_a_batch_is_the_same_whatever_was_asked_before(hand_made: Callable[..., Path]) -> None:
    shards = TokenShards(hand_made(*counting(100)), "train", 8)
    used = Batches(shards, 5, 3, 60000)
    for step in (9, 1, 4, 9, 2, 30, 1):
        assert used.batch(step).equal(Batches(shards, 5, 3, 60000).batch(step))


def archive() -> bytes:
    np.savez(buffer := io.BytesIO(), tokens=np.arange(3))
    return buffer.getvalue()


SHARD_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "header cut": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "int64": lambda path: np.save(path, np.load(path).astype(np.int64)),
    "float32": lambda path: np.save(path, np.load(path).astype(np.float32)),
    "shorter": lambda path: np.save(path, np.load(path)[:-1]),
    "longer": lambda path: np.save(path, np.append(np.load(path), np.uint16(0))),
    "two dims": lambda path: np.save(path, np.load(path)[None]),
    "pickle": lambda path: np.save(path, np.array([{}], dtype=object), allow_pickle=True),
    "text": lambda path: path.write_text("no array"),
    "archive": lambda path: path.write_bytes(archive()),
    "broken archive": lambda path: path.write_bytes(archive()[:20]),
}


@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_a_damaged_shard_is_named_with_the_remedy(dataset: Path, damage: str) -> None:
    path = dataset / "train-00000.npy"
    SHARD_DAMAGE[damage](path)
    with pytest.raises(DataError, match=rf"train-00000\.npy: .* delete {dataset}"):
        TokenShards(dataset, "train", 16)


def test_a_flipped_byte_in_a_shards_header_is_noticed_or_harmless(dataset: Path) -> None:
    path = dataset / "train-00000.npy"
    intact, tokens = path.read_bytes(), np.load(path)
    for position in range(128):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        with contextlib.suppress(DataError):
            np.testing.assert_array_equal(TokenShards(dataset, "train", 16).shards[0], tokens)


INDEX_DAMAGE: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "not JSON": b'{"format": 1, ',
    "not UTF-8": b"\xff\xfe",
    "other format": b'{"format": 2, "splits": {"train": []}}',
    "no splits": b'{"format": 1}',
    "other splits": b'{"format": 1, "splits": {"test": []}}',
    "a number for shards": b'{"format": 1, "splits": {"train": 3}}',
    "no count": b'{"format": 1, "splits": {"train": [{"file": "train-00000.npy"}]}}',
    "no file": b'{"format": 1, "splits": {"train": [{"tokens": 3}]}}',
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_a_damaged_index_is_named_with_the_remedy(dataset: Path, damage: str) -> None:
    path, value = dataset / "dataset.json", INDEX_DAMAGE[damage]
    path.unlink() if value is None else path.write_bytes(value)
    with pytest.raises(DataError, match=rf"dataset\.json: .*delete {dataset}"):
        TokenShards(dataset, "train", 16)


def test_a_folder_without_index_is_named_with_the_remedy(config: Config, dataset: Path) -> None:
    (dataset / "dataset.json").unlink()
    with pytest.raises(DataError, match=rf"dataset\.json is missing: delete {dataset}"):
        prepare(config.data, config.model.vocab_size, quiet)


def test_a_token_outside_the_vocabulary_names_the_shard(hand_made: Callable[..., Path]) -> None:
    folder = hand_made(*counting(20, 20))
    shards = TokenShards(folder, "train", 8)
    assert len(shards.windows([0, 1], 17)) == 2  # tokens 0 to 16
    with pytest.raises(DataError, match=rf"train-00001\.npy: token 28 .*vocabulary \(28\).* delete {folder}"):
        shards.windows([0, 2], 28)


def test_a_corpus_too_small_for_a_window_names_the_field(dataset: Path) -> None:
    with pytest.raises(DataError, match=rf"{dataset}.* no validation shard holds a window of 100001 tokens.* lower train\.sequence_length"):
        TokenShards(dataset, "validation", 100_000)


def test_shards_too_small_for_a_window_name_their_field(config: Config) -> None:
    """More text would not help."""
    folder = prepare(replace(config.data, shard_tokens=16), config.model.vocab_size, quiet)
    with pytest.raises(DataError, match=r"data\.shard_tokens"):
        TokenShards(folder, "train", 16)


SOURCES = {
    "no folder": ({"source": "absent"}, r"data\.source = 'absent' is not a folder: give "),
    "no package": ({"source": "package:absent"}, r"data\.source = 'package:absent': no package 'absent' is installed here: install it, or"),
    "a module": ({"source": "package:antigravity"}, r"no package 'antigravity' is installed"),
    "no name": ({"source": "package:"}, r"no package '' is installed"),
    "no file": ({"pattern": "*.rst"}, r"corpus: 0 text files match data\.pattern = '\*\.rst', but at least 2 .*give another"),
    "one file": ({"pattern": "1.txt"}, r"corpus: 1 text files match data\.pattern = '1\.txt', but at least 2 .*give another"),
    "cache below a file": ({"cache_dir": "/dev/null/cache"}, r"data\.cache_dir = '/dev/null/cache' cannot be written .*give another"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_cannot_be_used_names_the_field(config: Config, case: str) -> None:
    change, message = SOURCES[case]
    with pytest.raises(DataError, match=message):
        prepare(replace(config.data, **change), config.model.vocab_size, quiet)


def test_a_vocabulary_smaller_than_the_bytes_names_field_and_least(config: Config) -> None:
    with pytest.raises(DataError, match=r"model\.vocab_size = 256 .* at least 257"):
        prepare(config.data, 256, quiet)
    assert prepare(config.data, 257, quiet).is_dir()
