"""From `[data]` to data sets: a corpus is prepared once, several data sets fit together, and damage
is reported by file name."""

import errno
import fcntl
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from making_helpers import Make, documents_of, texts_of

from forked import ForkedPython
from lather.data import dataset, documents, records
from lather.data.batch_sizes import BatchSizes
from lather.data.batches import HeldOut, read_batch
from lather.data.config import DataConfig
from lather.data.dataset import MANIFEST, DataSet
from lather.data.documents import load_tokenizer
from lather.data.opening import held_out_sets, open_datasets, open_source, training_batches
from lather.data.recipe import END_OF_TEXT
from lather.data.sources import list_sources
from lather.errors import ConfigError, DataError
from lather.train.trained_model import first_words

VOCABULARY = 300


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Eight text files, one of them in a sub-folder."""
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    for number in range(8):
        text = "".join(f"line {line} of file {number}, naïve\n" for line in range(12 + number))
        (folder / ("more" if number == 5 else "") / f"{number}.txt").write_text(text, "utf-8")
    return folder


@pytest.fixture
def data(corpus: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(
        source=str(corpus), pattern="*.txt", cache_dir=str(tmp_path / "cache"), holdout_every=4
    )


def opened(data: DataConfig, vocab_size: int = VOCABULARY) -> DataSet:
    [dataset] = open_datasets(data, vocab_size, print)
    return dataset


# --- the corpus -----------------------------------------------------------------------------------


def test_the_standard_library_is_taken_without_tests_and_other_packages(tmp_path: Path) -> None:
    """All files are listed; a data set is made of some of them."""
    whole, some = (DataConfig(cache_dir=str(tmp_path), pattern=x) for x in ("", "[a-c]*.py"))
    names = [file.name for file in list_sources(whole.recipe(VOCABULARY)).files]
    assert len(names) > 500
    assert {"argparse.py", "json/decoder.py"} <= {*names}
    assert not [name for name in names if {"test", "tests", "site-packages"} & {*name.split("/")}]
    taken = [file for file in names if fnmatch(file.rpartition("/")[2], some.pattern)]
    splits = opened(some).manifest.splits
    assert splits["validation"].documents > 1
    assert splits["train"].documents + splits["validation"].documents > 0.9 * len(taken)


def test_the_files_of_an_installed_package(data: DataConfig) -> None:
    import rich

    dataset = opened(replace(data, source="package:rich", pattern="*.py"))
    files = [
        path for path in Path(rich.__file__).parent.rglob("*.py") if path.read_text("utf-8").strip()
    ]
    assert sum(split.documents for split in dataset.manifest.splits.values()) == len(files)


def test_a_corpus_is_prepared_once_and_its_texts_are_not_read_again(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(data)
    monkeypatch.setattr(records, "_open", lambda path: 1 / 0)
    assert opened(data).folder == first.folder


CHANGES: dict[str, dict[str, int]] = {
    "text": {},
    "name": {},
    "vocabulary": {},
    "holdout": {"holdout_every": 3},
    "shards": {"shard_tokens": 99},
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_is_another_data_set(data: DataConfig, corpus: Path, change: str) -> None:
    first, file = opened(data), corpus / "1.txt"
    if change == "text":
        file.write_text(file.read_text("utf-8")[:-1] + "!", "utf-8")
    elif change == "name":
        file.rename(corpus / "9.txt")
    changed = replace(data, **CHANGES[change])  # type: ignore[arg-type]
    other = opened(changed, VOCABULARY + (change == "vocabulary"))
    assert other.folder != first.folder
    if change != "vocabulary":  # these few texts do not fill a vocabulary of 300
        assert other.manifest.identity != first.manifest.identity


def test_the_same_texts_elsewhere_are_the_same_tokens(
    data: DataConfig, corpus: Path, tmp_path: Path
) -> None:
    corpus.rename(tmp_path / "moved")
    first = opened(replace(data, source=str(tmp_path / "moved")))
    (tmp_path / "moved").rename(corpus)
    assert opened(data).manifest.identity == first.manifest.identity


def test_a_folder_that_another_process_has_just_removed_is_made_again(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has made the data set removes the folder in which the others wait."""
    open_file, removed = Path.open, []

    def opening(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == ".lock" and not removed:
            removed.append(path.parent.rmdir())
        return open_file(path, *args, **options)

    monkeypatch.setattr(Path, "open", opening)
    assert opened(data).folder.is_dir()
    assert removed


def test_a_lock_whose_file_was_replaced_during_the_wait_is_taken_anew(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a third process, which locks the new file, would make the data set beside it."""
    lock, names = fcntl.flock, []

    def locking(file: Any, operation: int) -> None:
        if not names:
            Path(file.name).rename(Path(file.name).with_name("removed"))
            Path(file.name).touch()
        names.append(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", locking)
    assert opened(data).folder.is_dir()
    assert [Path(name).name for name in names] == ["removed", ".lock"]


def test_two_processes_that_prepare_one_corpus_wait_for_each_other(data: DataConfig) -> None:
    program = "import sys; from lather.data.config import DataConfig\n"
    program += "from lather.data.opening import open_datasets\n"
    program += "config = DataConfig(source=sys.argv[1], pattern='*.txt', cache_dir=sys.argv[2])\n"
    program += "print(open_datasets(config, 300, lambda text: None)[0].folder)"
    command, pipe = ["-c", program, data.source, data.cache_dir], subprocess.PIPE
    processes = [ForkedPython(command, stdout=pipe, stderr=pipe) for _ in range(4)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(list(Path(data.cache_dir).iterdir())) == 1


SOURCES = {
    "no folder": ({"source": "absent"}, r"absent: no such file or folder: give "),
    "no package": ({"source": "package:absent"}, r"no package 'absent' is installed here: install"),
    "a module": ({"source": "package:antigravity"}, r"no package 'antigravity' is installed"),
    "no name": ({"source": "package:"}, r"no package '' is installed"),
    "no file": (
        {"pattern": "*.rst"},
        r"no file matches the pattern '\*\.rst': there are \d+ \.txt: give .* such as '\*\.txt'",
    ),
    "one file": (
        {"pattern": "1.txt"},
        r"1 document matches data\.pattern = '1\.txt', but at least",
    ),
    "cache below a file": (
        {"cache_dir": "/dev/null/a"},
        r"/dev/null/a/.* cannot be written .*give",
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_cannot_be_used_says_so(data: DataConfig, case: str) -> None:
    change, message = SOURCES[case]
    with pytest.raises(DataError, match=message):
        opened(replace(data, **change))


def test_a_vocabulary_smaller_than_the_bytes_names_field_and_least(data: DataConfig) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size = 256 .* at least 257"):
        opened(data, 256)
    assert opened(data, 257).manifest.vocab_size == 257


def test_a_document_that_spells_the_end_of_text_token_is_one_document(
    data: DataConfig, corpus: Path
) -> None:
    text = f"before {END_OF_TEXT} after " * 5
    for path in corpus.rglob("*.txt"):
        path.write_text(text)
    dataset = opened(data)
    assert set(texts_of(dataset)) == {text}
    end = dataset.manifest.end_token
    assert all(document.count(end) == 1 for document in documents_of(dataset))


@pytest.mark.parametrize("contents", [None, b"{", b"\xff\xfe"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(DataError, match=f"^{path}: "):
        load_tokenizer(path, "put it back")


# --- several data sets ----------------------------------------------------------------------------


@pytest.fixture
def two(corpus: Path, make: Make) -> DataConfig:
    """Two data sets with one tokenizer."""
    patterns, options = {"one": "[0-3].txt", "two": "[4-7].txt"}, {"holdout_every": 3}
    folders = (make(corpus, name=n, pattern=p, **options).folder for n, p in patterns.items())
    return DataConfig(path=tuple(map(str, folders)))


def test_every_sequence_of_all_data_sets_comes_once_in_an_epoch(two: DataConfig) -> None:
    datasets = open_datasets(two, VOCABULARY, print)
    batches = training_batches(datasets, two, 16, BatchSizes(4), 0)
    total = sum(batches.order.sizes)
    assert sorted(batches.order.samples(0, total)) == [
        (source, index) for source, size in enumerate(batches.order.sizes) for index in range(size)
    ]
    labels = sum(batches.batch(step).num_labels for step in range(1, total // 4 + 1))
    tokens = sum(dataset.manifest.splits["train"].tokens for dataset in datasets)
    # the first token of each data set is no label
    assert tokens - 2 - 4 * 16 <= labels <= tokens - 2


def test_weights_share_out_the_sequences(two: DataConfig) -> None:
    config = replace(two, weights=(3, 1))
    batches = training_batches(
        open_datasets(config, VOCABULARY, print), config, 16, BatchSizes(4), 0
    )
    sources = [source for source, _ in batches.order.samples(0, 400)]
    assert abs(sources.count(0) - 300) <= 3


def test_held_out_sets_have_names(two: DataConfig) -> None:
    config = DataConfig(path=two.path[:1], validation={"other": two.path[1]})
    sets = held_out_sets(open_datasets(config, VOCABULARY, print), config, 16, 4, VOCABULARY)
    assert list(sets) == ["one", "other"]
    assert all(1 <= len(held_out.indices) <= 4 for held_out in sets.values())


def test_another_tokenizer_or_vocabulary_is_refused(two: DataConfig, data: DataConfig) -> None:
    path = (two.path[0], str(opened(data).folder))
    with pytest.raises(DataError, match=r"was made with another tokenizer than .*one"):
        open_datasets(DataConfig(path=path), VOCABULARY, print)
    fault = (
        r"has a vocabulary of 300 tokens, but model\.vocab_size is 299: give "
        r"model\.vocab_size 300 or more, or another data set$"
    )
    with pytest.raises(DataError, match=fault):
        open_datasets(DataConfig(path=two.path[:1]), VOCABULARY - 1, print)


@pytest.mark.parametrize("weights", [(1.0,), (0.0, 0.0), (-1.0, 2.0), (float("nan"), 1.0)])
def test_weights_that_do_not_fit_name_the_field(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"data\.weights = "):
        DataConfig(path=("a", "b"), weights=weights)


# --- damage ---------------------------------------------------------------------------------------

SHARD = "train-00000-000.npy"
DAMAGE: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "missing": (lambda content: None, "is missing"),
    "empty": (lambda content: b"", "is empty: it has 0 bytes, not"),
    "truncated": (lambda content: content[:-2], "is truncated: it has .* bytes, not"),
    "longer": (lambda content: content + b"xx", "is too long: it has .* bytes, not"),
}


@pytest.mark.parametrize("suffix", ["npy", "ends.npy"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_with_the_remedy(
    data: DataConfig, damage: str, suffix: str
) -> None:
    dataset = opened(data)
    path = dataset.folder / SHARD.replace("npy", suffix)
    change, fault = DAMAGE[damage]
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    remedy = f"delete {dataset.folder} to make the data set again"
    with pytest.raises(DataError, match=rf"{path}: .*{fault}.* {remedy}"):
        dataset.split("train")


def test_a_flipped_bit_is_found_by_the_check(data: DataConfig) -> None:
    dataset = opened(data)
    assert dataset.check() == []
    path = dataset.folder / SHARD
    content = path.read_bytes()
    for place in (3, 60, 128, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        [line] = dataset.check()
        assert line.startswith(f"{path}: its checksum is ")


def test_a_token_outside_the_vocabulary_names_the_data_set(data: DataConfig) -> None:
    dataset = opened(data)
    path = dataset.folder / SHARD
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    source = open_source(dataset, "train", data, 8)
    fault = (
        rf"{dataset.folder} \(train\): token 65535 .* outside the vocabulary \(300\).*`lather data"
    )
    with pytest.raises(DataError, match=fault):
        read_batch([source], [(0, len(source) - 1)])


MANIFESTS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "not JSON": b'{"format": 2, ',
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "without a format": b'{"splits": {}}',
    "without a checksum": b'{"format": 3, "splits": {}}',
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest_is_named_with_the_remedy(data: DataConfig, case: str) -> None:
    folder, value = opened(data).folder, MANIFESTS[case]
    path = folder / MANIFEST
    path.unlink() if value is None else path.write_bytes(value)
    with pytest.raises(DataError, match=rf"{path}: .*delete {folder} and make the data set again"):
        DataSet(folder)


def test_a_folder_of_something_else_is_not_to_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="not a data set") as caught:
        DataSet(tmp_path)
    assert "delete" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_not_to_be_deleted(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(data).folder

    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for module in (dataset, documents):
        monkeypatch.setattr(module, "read_text", refuse)
    with pytest.raises(DataError, match=r"dataset.json: cannot be read \(Perm") as caught:
        DataSet(folder)
    assert "delete" not in str(caught.value)
    with pytest.raises(DataError, match=r"tokenizer.json: cannot be read \(Perm") as caught:
        load_tokenizer(folder / "tokenizer.json", "delete it")
    assert "delete" not in str(caught.value)


def test_a_manifest_that_was_edited_is_noticed(data: DataConfig) -> None:
    path = opened(data).folder / MANIFEST
    text = path.read_text()
    for change in (
        ('"vocab_size": 300', '"vocab_size": 301'),
        ('"documents": 6', '"documents": 5'),
        ('"train"', '"training"'),
    ):
        assert change[0] in text
        path.write_text(text.replace(*change))
        with pytest.raises(DataError, match="its checksum is wrong, it was edited or damaged"):
            DataSet(path.parent)


def test_a_folder_without_a_pattern_is_taken_whole(tmp_path: Path) -> None:
    """For Python's own library, or a package, it is the Python files that are taken."""
    for name in ("a.md", "b.txt", "c.py", ".hidden"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    files = list_sources(DataConfig(source=str(tmp_path)).recipe(300))
    assert [file.name for file in files.files] == ["a.md", "b.txt", "c.py"]
    for source in ("python-stdlib", "package:lather"):
        listed = list_sources(DataConfig(source=source).recipe(300)).files
        assert {Path(file.name).suffix for file in listed} == {".py"}
    fault = r"there are 1 \.md, 1 \.py, 1 \.txt: give another pattern, such as '\*\.md', or another"
    with pytest.raises(DataError, match=fault):
        list_sources(DataConfig(source=str(tmp_path), pattern="*.rst").recipe(300))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the folder has no files: give another one$"):
        list_sources(DataConfig(source=str(tmp_path / "empty")).recipe(300))


def test_the_first_words_of_held_out_text_are_a_prompt(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(
            f"Number {number} begins thus, and then it goes on and on.\n" * 9
        )
    config = DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / "data"), holdout_every=3)
    (dataset,) = open_datasets(config, 300, print)
    assert dataset.tokenizer is not None
    held_out = HeldOut(open_source(dataset, "validation", config, 16), 4)
    tokenizer = load_tokenizer(dataset.tokenizer, "")
    prompt = first_words(held_out, tokenizer, config.end_of_text)
    assert re.match(r"Number [0-5] begins", prompt)
    assert "<|" not in prompt
