"""From `[data]` to batches: a corpus is prepared once, sequences are right, and damage is reported by file name."""

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from making_helpers import Notes, documents_of

from lather.data.batches import Batch, Batches, HeldOut, Source, read_batch
from lather.data.config import DataConfig
from lather.data.dataset import MANIFEST, DataSet
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.making import list_sources, make_dataset
from lather.data.opening import held_out_sets, open_datasets, open_source, training_batches
from lather.data.order import MixturePhase, Order
from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.data.sequences import IGNORE_INDEX, PackedDocuments, Sequences, Windows
from lather.data.shards import ShardReader, ShardWriter
from lather.errors import ConfigError, DataError
from lather.train.sampling import first_words

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
    return DataConfig(source=str(corpus), pattern="*.txt", cache_dir=str(tmp_path / "cache"), holdout_every=4)


def opened(data: DataConfig, vocab_size: int = VOCABULARY) -> DataSet:
    [dataset] = open_datasets(data, vocab_size, lambda text: None)
    return dataset


def hand_made(folder: Path, *documents: list[int], shard_tokens: int = 10**6, learned: list[list[bool]] | None = None) -> ShardReader:
    """Write the documents as shards."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "train", np.dtype(np.uint16), shard_tokens, masked=learned is not None)
    for number, document in enumerate(documents):
        writer.write(np.array(document), None if learned is None else np.array(learned[number]))
        writer.end_document()
    writer.finish()
    return ShardReader(folder, writer.entries, np.dtype(np.uint16))


def rows_of(sequences: Sequences, *, apart: bool = False) -> Batch:
    return read_batch([Source("these", sequences, 2**16)], [(0, index) for index in range(len(sequences))], apart=apart)


# --- the corpus ---------------------------------------------------------------------------------------------------------------------


def test_the_standard_library_is_taken_without_tests_and_other_packages(tmp_path: Path) -> None:
    dataset = opened(DataConfig(cache_dir=str(tmp_path)), 2048)
    assert dataset.manifest.splits["train"].documents > 200
    assert dataset.manifest.splits["validation"].documents > 10
    assert dataset.manifest.splits["train"].tokens > 10**6


def test_the_files_of_an_installed_package(data: DataConfig) -> None:
    import rich

    dataset = opened(replace(data, source="package:rich", pattern="*.py"))
    files = [path for path in Path(rich.__file__).parent.rglob("*.py") if path.read_text("utf-8").strip()]
    assert sum(split.documents for split in dataset.manifest.splits.values()) == len(files)


def test_a_corpus_is_prepared_once_and_its_texts_are_not_read_again(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(data)
    monkeypatch.setattr(Path, "read_bytes", lambda path: 1 / 0)
    assert opened(data).folder == first.folder


CHANGES = ["text", "name", "vocabulary", "holdout", "shards"]


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_is_another_data_set(data: DataConfig, corpus: Path, change: str) -> None:
    first, vocab_size = opened(data), VOCABULARY
    if change == "text":
        (corpus / "1.txt").write_text((corpus / "1.txt").read_text("utf-8")[:-1] + "!", "utf-8")
    elif change == "name":
        (corpus / "1.txt").rename(corpus / "9.txt")
    elif change == "vocabulary":
        vocab_size += 1
    else:
        data = replace(data, **{"holdout": {"holdout_every": 3}, "shards": {"shard_tokens": 99}}[change])
    other = opened(data, vocab_size)
    assert other.folder != first.folder
    if change != "vocabulary":  # these few texts do not fill a vocabulary of 300
        assert other.manifest.identity != first.manifest.identity


def test_the_same_texts_elsewhere_are_the_same_tokens(data: DataConfig, corpus: Path, tmp_path: Path) -> None:
    corpus.rename(tmp_path / "moved")
    first = opened(replace(data, source=str(tmp_path / "moved")))
    (tmp_path / "moved").rename(corpus)
    assert opened(data).manifest.identity == first.manifest.identity


def test_two_processes_that_prepare_one_corpus_wait_for_each_other(data: DataConfig) -> None:
    program = (
        "import sys; from lather.data.config import DataConfig; from lather.data.opening import open_datasets\n"
        "print(open_datasets(DataConfig(source=sys.argv[1], pattern='*.txt', cache_dir=sys.argv[2]), 300, lambda text: None)[0].folder)"
    )
    command = [sys.executable, "-c", program, data.source, data.cache_dir]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(list(Path(data.cache_dir).iterdir())) == 1


SOURCES = {
    "no folder": ({"source": "absent"}, r"absent: no such file or folder: give "),
    "no package": ({"source": "package:absent"}, r"no package 'absent' is installed here: install it, or"),
    "a module": ({"source": "package:antigravity"}, r"no package 'antigravity' is installed"),
    "no name": ({"source": "package:"}, r"no package '' is installed"),
    "no file": ({"pattern": "*.rst"}, r"no file matches the pattern '\*\.rst': there are \d+ \.txt: give .* such as '\*\.txt', or another"),
    "one file": ({"pattern": "1.txt"}, r"1 document matches data\.pattern = '1\.txt', but at least 2 .*give another"),
    "cache below a file": ({"cache_dir": "/dev/null/cache"}, r"/dev/null/cache/.* cannot be written .*give another"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_cannot_be_used_says_so(data: DataConfig, case: str) -> None:
    change, message = SOURCES[case]
    with pytest.raises(DataError, match=message):
        opened(replace(data, **change))


def test_a_vocabulary_smaller_than_the_bytes_names_field_and_least(data: DataConfig) -> None:
    with pytest.raises(DataError, match=r"vocab_size = 256 .* at least 257"):
        opened(data, 256)
    assert opened(data, 257).manifest.vocab_size == 257


def test_a_document_that_spells_the_end_of_text_token_is_one_document(data: DataConfig, corpus: Path) -> None:
    text = f"before {END_OF_TEXT} after " * 5
    for path in corpus.rglob("*.txt"):
        path.write_text(text)
    dataset = opened(data)
    assert dataset.tokenizer is not None
    tokenizer = load_tokenizer(dataset.tokenizer, "")
    for document in documents_of(dataset, "train"):
        assert document.count(tokenizer.token_to_id(END_OF_TEXT)) == 1
        assert tokenizer.decode(document[:-1]) == text


@pytest.mark.parametrize("contents", [None, b"{", b"\xff\xfe"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(DataError, match=f"^{path}: "):
        load_tokenizer(path, "put it back")


# --- several data sets --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path, corpus: Path) -> tuple[Path, Path]:
    """Two data sets with one tokenizer."""
    train_tokenizer(iter(["line of file naïve"]), VOCABULARY, END_OF_TEXT).save(str(tmp_path / "tokenizer.json"))
    paths = (tmp_path / "one", tmp_path / "two")
    for path, pattern in zip(paths, ("[0-3].txt", "[4-7].txt"), strict=True):
        recipe = DataRecipe(
            (str(corpus),), pattern=pattern, tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=VOCABULARY, holdout_every=3
        )
        make_dataset(path, recipe, Notes(), 1)
    return paths


def test_every_sequence_of_all_data_sets_comes_once_in_an_epoch(two: tuple[Path, Path]) -> None:
    config = DataConfig(path=tuple(map(str, two)))
    datasets = open_datasets(config, VOCABULARY, lambda text: None)
    batches = training_batches(datasets, config, 16, 4, 0)
    total = sum(batches.order.sizes)
    samples = batches.order.samples(0, total)
    assert sorted(samples) == [(source, index) for source, size in enumerate(batches.order.sizes) for index in range(size)]
    labels = sum(batches.batch(step).num_labels for step in range(1, total // 4 + 1))
    tokens = sum(dataset.manifest.splits["train"].tokens for dataset in datasets)
    assert tokens - 2 - 4 * 16 <= labels <= tokens - 2  # the first token of each data set is no label


def test_weights_share_out_the_sequences(two: tuple[Path, Path]) -> None:
    config = DataConfig(path=tuple(map(str, two)), weights=(3, 1))
    batches = training_batches(open_datasets(config, VOCABULARY, lambda text: None), config, 16, 4, 0)
    sources = [source for source, _ in batches.order.samples(0, 400)]
    assert abs(sources.count(0) - 300) <= 3


def test_held_out_sets_have_names(two: tuple[Path, Path]) -> None:
    config = DataConfig(path=(str(two[0]),), validation={"other": str(two[1])})
    sets = held_out_sets(open_datasets(config, VOCABULARY, lambda text: None), config, 16, 4, VOCABULARY)
    assert list(sets) == ["one", "other"]
    assert all(1 <= len(held_out) <= 4 for held_out in sets.values())


def test_another_tokenizer_or_vocabulary_is_refused(two: tuple[Path, Path], data: DataConfig) -> None:
    other = opened(data)
    with pytest.raises(DataError, match=r"was made with another tokenizer than .*one"):
        open_datasets(DataConfig(path=(str(two[0]), str(other.folder))), VOCABULARY, lambda text: None)
    with pytest.raises(DataError, match=r"has a vocabulary of 300 tokens, but model\.vocab_size is 299: they do not fit"):
        open_datasets(DataConfig(path=(str(two[0]),)), VOCABULARY - 1, lambda text: None)


@pytest.mark.parametrize("weights", [(1.0,), (0.0, 0.0), (-1.0, 2.0), (float("nan"), 1.0)])
def test_weights_that_do_not_fit_name_the_field(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"data\.weights = "):
        DataConfig(path=("a", "b"), weights=weights)


# --- sequences ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 8, 100])
@pytest.mark.parametrize("shard_tokens", [1, 7, 10**6])
def test_windows_cover_the_stream_across_shards(tmp_path: Path, length: int, shard_tokens: int) -> None:
    """Every token but the first is a label once, and its input is the token before it."""
    reader = hand_made(tmp_path / "shards", list(range(9)), list(range(9, 12)), list(range(12, 41)), shard_tokens=shard_tokens)
    batch = rows_of(Windows(reader, length))
    kept = batch.labels_BS != IGNORE_INDEX
    assert batch.labels_BS[kept].tolist() == list(range(1, 41))
    assert batch.inputs_BS[kept].tolist() == list(range(40))
    assert not kept[:-1].logical_not().any()
    assert sum(Windows(reader, length).num_labels(index) or 0 for index in range(len(batch.labels_BS))) == 40


def test_windows_mark_where_documents_begin(tmp_path: Path) -> None:
    """Marks do not depend on the token that ends a document, nor on shards."""
    reader = hand_made(tmp_path / "shards", [5, 5, 0], [6, 9], [7, 7, 7, 7, 0], shard_tokens=3)
    batch = rows_of(Windows(reader, 5, apart=True), apart=True)
    assert batch.begins_BS is not None
    assert batch.inputs_BS.tolist() == [[5, 5, 0, 6, 9], [7, 7, 7, 7, 0]]
    assert batch.begins_BS.int().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]


def test_packed_sequences_hold_whole_documents(tmp_path: Path) -> None:
    documents = [[10 * number + place for place in range(length)] for number, length in enumerate([4, 9, 2, 6, 3, 5, 1, 8, 26], 1)]
    reader = hand_made(tmp_path / "shards", *documents, shard_tokens=12)
    packed = PackedDocuments.open(reader, "train", 8)
    batch = rows_of(packed, apart=True)
    assert batch.begins_BS is not None
    found = []
    for inputs, labels, begins in zip(batch.inputs_BS, batch.labels_BS, batch.begins_BS, strict=True):
        bounds = [*begins.nonzero().flatten().tolist(), 8]
        for low, high in itertools.pairwise(bounds):
            if labels[low] != IGNORE_INDEX:
                found.append([int(inputs[low]), *labels[low:high].tolist()])
    whole = [document for document in documents if 2 <= len(document) <= 9]
    pieces = [documents[-1][start : start + 9] for start in range(0, 25, 8)]
    assert sorted(found) == sorted([*whole, *pieces])
    assert len(batch.inputs_BS) == -(-sum(len(document) - 1 for document in documents) // 8)
    assert sum(packed.num_labels(index) or 0 for index in range(len(packed))) == batch.num_labels
    assert PackedDocuments.open(reader, "train", 8)._chunks.tolist() == packed._chunks.tolist()


def test_what_is_not_learned_is_no_label(tmp_path: Path) -> None:
    reader = hand_made(tmp_path / "shards", [1, 2, 3, 4], [5, 6], learned=[[False, False, True, True], [True, True]])
    for sequences in (Windows(reader, 8), PackedDocuments.open(reader, "train", 8)):
        batch = rows_of(sequences)
        assert sequences.num_labels(0) is None
        assert set(batch.labels_BS.flatten().tolist()) == ({3, 4, 5, 6} if isinstance(sequences, Windows) else {3, 4, 6}) | {IGNORE_INDEX}


# --- batches ------------------------------------------------------------------------------------------------------------------------


def batches_of(tmp_path: Path, batch_size: int, seed: int = 0, phases: tuple[MixturePhase, ...] = (MixturePhase(0),)) -> Batches:
    sources = [
        Source(name, Windows(hand_made(tmp_path / name, list(range(start, start + count))), 4), 2**16)
        for name, start, count in (("a", 0, 41), ("b", 1000, 81))
    ]
    weights = [Order([len(source) for source in sources], seed, phases)]
    return Batches(sources, weights[0], batch_size)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 50])
def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path, batch_size: int) -> None:
    used = batches_of(tmp_path, batch_size, 3)
    for step in (9, 1, 4, 9, 2, 30, 1):
        fresh = batches_of(tmp_path, batch_size, 3).batch(step)
        assert used.batch(step).labels_BS.equal(fresh.labels_BS)
        assert used.batch(step).inputs_BS.equal(fresh.inputs_BS)
    assert not batches_of(tmp_path, 30, 4).batch(1).labels_BS.equal(batches_of(tmp_path, 30, 3).batch(1).labels_BS)


@pytest.mark.parametrize("phases", [(MixturePhase(0),), (MixturePhase(0, (1, 3)),), (MixturePhase(0), MixturePhase(100, (1, 1)))])
def test_ranks_share_a_batch_whatever_their_number(tmp_path: Path, phases: tuple[MixturePhase, ...]) -> None:
    batches = batches_of(tmp_path, 12, phases=phases)
    for step in (1, 5, 11):
        whole = batches.batch(step)
        for ranks in (2, 3, 4, 12):
            shares = [batches.batch(step, rank, ranks) for rank in range(ranks)]
            assert torch.cat([share.labels_BS for share in shares]).equal(whole.labels_BS)
            assert {share.labels_of_all for share in shares} == {whole.num_labels}


@pytest.mark.parametrize("seed", range(5))
def test_every_document_comes_once_in_an_epoch_wherever_20_starts_go_on_and_on_a_changing_mesh(tmp_path: Path, seed: int) -> None:
    """Every start goes on from the newest checkpoint with another number of ranks. What a kill has undone does not count."""
    draw, documents = random.Random(seed), 240
    reader = hand_made(tmp_path / "many", *[[token] * (3 + token % 9) for token in range(documents)], shard_tokens=100)
    source = Source("many", PackedDocuments.open(reader, "train", 16), documents)
    steps = -(-len(source) // 12)
    seen: dict[int, list[torch.Tensor]] = {}  # the samples of each step
    step, kills = 0, 0
    while step < steps:
        batches = Batches([source], Order([len(source)], seed), 12, apart=True)  # made anew, as a fresh process makes them
        ranks = draw.choice([1, 2, 3, 4, 6, 12])
        reached = steps if kills == 20 else min(steps, step + draw.randint(1, 3))
        for number in range(step + 1, reached + 1):
            seen[number] = [batches.batch(number, rank, ranks).labels_BS for rank in range(ranks)]
        if kills < 20:
            kills += 1
            step = draw.randint(step, reached - 1)  # the step of the newest checkpoint
        else:
            step = reached
    assert kills == 20
    labels = torch.cat([labels_BS for number in sorted(seen) for labels_BS in seen[number]])[: len(source)]
    counts = torch.bincount(labels[labels != IGNORE_INDEX], minlength=documents)
    assert counts.tolist() == [2 + token % 9 for token in range(documents)]


def test_a_rank_reads_only_its_own_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, read = batches_of(tmp_path, 12), []
    fill = Windows.fill
    monkeypatch.setattr(Windows, "fill", lambda self, index, rows: (read.append(index), fill(self, index, rows)))
    batches.batch(3, 1, 4)
    assert len(read) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_held_out_sequences_are_shared_out_evenly(tmp_path: Path, ranks: int) -> None:
    source = batches_of(tmp_path, 1).sources[1]
    held_out = HeldOut(source, 7)
    shares = [held_out.batch(rank, ranks) for rank in range(ranks)]
    assert len({len(share.labels_BS) for share in shares}) == 1
    labels = torch.cat([share.labels_BS for share in shares])
    assert labels[labels != IGNORE_INDEX].tolist() == held_out.batch().labels_BS.flatten().tolist()


# --- damage -------------------------------------------------------------------------------------------------------------------------

SHARD = "train-00000-000.npy"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "is empty: it has 0 bytes, not"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-2]), "is truncated: it has .* bytes, not"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"xx"), "is too long: it has .* bytes, not"),
}


@pytest.mark.parametrize("suffix", ["npy", "ends.npy"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_with_the_remedy(data: DataConfig, damage: str, suffix: str) -> None:
    dataset = opened(data)
    path = dataset.folder / SHARD.replace("npy", suffix)
    change, message = DAMAGE[damage]
    change(path)
    with pytest.raises(DataError, match=rf"{path}: .*{message}.* delete {dataset.folder} to make the data set again"):
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
    batches = training_batches([dataset], data, 8, 1, 0)
    last = next(step for step in range(1, 10**4) if batches.order.samples(step - 1, step) == [(0, len(batches.sources[0]) - 1)])
    with pytest.raises(DataError, match=rf"{dataset.folder} \(train\): token 65535 .* outside the vocabulary \(300\).*`lather data check`"):
        batches.batch(last)


MANIFESTS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "not JSON": b'{"format": 2, ',
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "of another version": b'{"format": 3}',
    "without a checksum": b'{"format": 2, "splits": {}}',
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest_is_named_with_the_remedy(data: DataConfig, case: str) -> None:
    folder, value = opened(data).folder, MANIFESTS[case]
    path = folder / MANIFEST
    path.unlink() if value is None else path.write_bytes(value)
    with pytest.raises(DataError, match=rf"{path}: .*delete {folder} and make the data set again"):
        DataSet(folder)


def test_a_manifest_that_was_edited_is_noticed(data: DataConfig) -> None:
    path = opened(data).folder / MANIFEST
    text = path.read_text()
    for change in (('"vocab_size": 300', '"vocab_size": 301'), ('"documents": 6', '"documents": 5'), ('"train"', '"training"')):
        assert change[0] in text
        path.write_text(text.replace(*change))
        with pytest.raises(DataError, match="its checksum is wrong, it was edited or damaged"):
            DataSet(path.parent)


def test_a_damaged_packing_is_named(tmp_path: Path) -> None:
    reader = hand_made(tmp_path / "shards", [1, 2, 3])
    PackedDocuments.open(reader, "train", 8)
    (tmp_path / "shards" / "packed-train-8" / "chunks.npy").write_bytes(b"x")
    with pytest.raises(DataError, match=r"packed-train-8: damaged .*: delete it, and it is made again"):
        PackedDocuments.open(reader, "train", 8)


def test_a_folder_without_a_pattern_is_taken_whole(tmp_path: Path) -> None:
    """For Python's own library, or a package, it is the Python files that are taken."""
    for name in ("a.md", "b.txt", "c.py", ".hidden"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    files = list_sources(DataConfig(source=str(tmp_path)).recipe(300))
    assert [file.name for _, file in files] == ["a.md", "b.txt", "c.py"]
    for source in ("python-stdlib", "package:lather"):
        assert {Path(file.name).suffix for _, file in list_sources(DataConfig(source=source).recipe(300))} == {".py"}
    with pytest.raises(DataError, match=r"there are 1 \.md, 1 \.py, 1 \.txt: give another pattern, such as '\*\.md', or another folder$"):
        list_sources(DataConfig(source=str(tmp_path), pattern="*.rst").recipe(300))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the folder has no files: give another one$"):
        list_sources(DataConfig(source=str(tmp_path / "empty")).recipe(300))


def test_the_first_words_of_held_out_text_are_a_prompt(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"Number {number} begins thus, and then it goes on and on.\n" * 9)
    config = DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / "data"), holdout_every=3)
    (dataset,) = open_datasets(config, 300, print)
    assert dataset.tokenizer is not None
    held_out = HeldOut(open_source(dataset, "validation", config, 16), 4)
    tokenizer = load_tokenizer(dataset.tokenizer, "")
    prompt = first_words(held_out, tokenizer, config.end_of_text)
    assert re.match(r"Number [0-5] begins", prompt)
    assert "<|" not in prompt
