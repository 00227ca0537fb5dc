"""Text to tokens to batches: corpus, tokenizer, memory-mapped shards, and the order in which training reads them.

A data set is a folder of its own under `data.cache_dir`, named after what it was made from, so that another corpus, vocabulary or Python
never meets stale tokens. It holds `tokenizer.json` (byte-level BPE), shards `<split>-00000.npy` (flat uint16 or uint32 arrays, documents
ended by the end-of-text token) and `dataset.json`, which lists the shards. It is made aside and renamed: complete or absent.

Training reads windows of `sequence_length` + 1 tokens. The order is a permutation drawn from (seed, epoch), so that the batch of a step is
a function of the seed and the step alone: a resumed run needs no state to see the tokens that the uninterrupted one would have seen.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib.util
import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lather.errors import DataError
from lather.shapes import Int
from lather.train.config import END_OF_TEXT, DataConfig

FORMAT = 1
SPLITS = ("train", "validation")

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
"""Folders of the standard library that are not taken: tests, other people's packages, and generated tables."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Document:
    """One text file of the corpus."""

    name: str
    text: str


# --- corpus -------------------------------------------------------------------------------------------------------------------------


def read_corpus(config: DataConfig) -> list[Document]:
    """All text files, sorted by name; a file that is empty or not readable as text is left out."""
    root, left_out = _source(config.source)
    paths = sorted(path.relative_to(root) for path in root.rglob("*") if fnmatch.fnmatch(path.name, config.pattern))
    documents = []
    for path in paths:
        if left_out.isdisjoint(path.parts) and (root / path).is_file():
            try:
                text = (root / path).read_text("utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                documents.append(Document(path.as_posix(), text))
    if len(documents) < 2:
        raise DataError(
            f"{root}: {len(documents)} text files match data.pattern = {config.pattern!r}, but at least 2 are needed "
            "(one is held out): give another folder or pattern"
        )
    return documents


def _source(source: str) -> tuple[Path, set[str]]:
    """The folder of a source, and the names of folders in it that are left out."""
    if source == "python-stdlib":
        return Path(sysconfig.get_paths()["stdlib"]), STDLIB_LEFT_OUT
    kind, colon, name = source.partition(":")
    if kind == "package" and colon:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            for folder in (spec and spec.submodule_search_locations) or ():
                return Path(folder), {"__pycache__"}
        raise DataError(f"data.source = {source!r}: no package {name!r} is installed here: install it, or give another package or a folder")
    root = Path(source)
    if not root.is_dir():
        raise DataError(f"data.source = {source!r} is not a folder: give one that holds text files, 'python-stdlib' or 'package:NAME'")
    return root, {"__pycache__"}


def split_corpus(documents: Sequence[Document], holdout_every: int) -> dict[str, list[Document]]:
    """Every `holdout_every`-th document, from the middle of its run, is for validation; at least one is."""
    offset = min(holdout_every, len(documents)) // 2
    held_out = [index % holdout_every == offset for index in range(len(documents))]
    return {
        "train": [document for document, is_out in zip(documents, held_out, strict=True) if not is_out],
        "validation": [document for document, is_out in zip(documents, held_out, strict=True) if is_out],
    }


# --- preparation --------------------------------------------------------------------------------------------------------------------


def prepare(config: DataConfig, vocab_size: int, report: Report) -> Path:
    """The folder of the data set, made now unless it is there; `report` is told of what takes time."""
    documents = read_corpus(config)
    folder = Path(config.cache_dir) / f"{Path(config.source).resolve().name}-{vocab_size}-{_fingerprint(documents, config)}"
    if (folder / "dataset.json").exists():
        return folder
    if folder.exists():
        raise DataError(f"{folder / 'dataset.json'} is missing: delete {folder} to make the data set anew")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent)
    except OSError as error:
        raise DataError(f"data.cache_dir = {config.cache_dir!r} cannot be written ({error.strerror}): give another folder") from None
    with temporary:
        aside = Path(temporary.name) / folder.name
        aside.mkdir()
        _write(aside, documents, config, vocab_size, report)
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / "dataset.json").exists():  # else another process was first
                raise
    return folder


def _fingerprint(documents: Sequence[Document], config: DataConfig) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, config.holdout_every, config.shard_tokens]).encode())
    if config.tokenizer:
        digest.update(config.end_of_text.encode())
        with contextlib.suppress(OSError):  # reported when it is read
            digest.update(Path(config.tokenizer).read_bytes())
    for document in documents:
        digest.update(f"{document.name}\0{len(document.text)}\0".encode())
        digest.update(document.text.encode("utf-8", errors="replace"))
    return digest.hexdigest()[:12]


def _write(folder: Path, documents: list[Document], config: DataConfig, vocab_size: int, report: Report) -> None:
    split = split_corpus(documents, config.holdout_every)
    size = sum(len(document.text) for document in documents)
    if config.tokenizer:
        report(f"tokenizer: {config.tokenizer}, for {len(documents)} files, {size / 1e6:.1f} M characters")
        tokenizer = _given_tokenizer(config, vocab_size)
    else:
        report(f"tokenizer: byte-level BPE, {vocab_size} tokens, from {len(documents)} files, {size / 1e6:.1f} M characters")
        tokenizer = train_tokenizer((document.text for document in split["train"]), vocab_size, config.end_of_text)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(config.end_of_text)
    assert end is not None
    shards = {}
    for name, part in split.items():
        shards[name] = _write_shards(folder, name, part, tokenizer, end, config.shard_tokens)
        report(f"{name}: {len(part)} files, {sum(shard['tokens'] for shard in shards[name]):,} tokens")
    (folder / "dataset.json").write_text(json.dumps({"format": FORMAT, "vocab_size": vocab_size, "splits": shards}, indent=1))


def _given_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(Path(config.tokenizer), "data.tokenizer must be a tokenizer.json, or empty")
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise DataError(f"data.tokenizer = {config.tokenizer!r} has token {highest}, but model.vocab_size is {vocab_size}: they do not fit")
    if tokenizer.token_to_id(config.end_of_text) is None:
        raise DataError(
            f"data.end_of_text = {config.end_of_text!r} is no token of {config.tokenizer}: give the one that ends a document there"
        )
    return tokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int, end_of_text: str = END_OF_TEXT) -> Tokenizer:
    """Byte-level BPE: any text encodes, and decodes to itself. Token 0, `end_of_text`, ends a document."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise DataError(f"model.vocab_size = {vocab_size} is too small for byte-level BPE: give at least {len(alphabet) + 1}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[end_of_text], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: Path, remedy: str) -> Tokenizer:
    """A `tokenizer.json`; a missing or damaged one is reported by name, with the remedy."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True
        return tokenizer
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path}: not a usable tokenizer ({error}): {remedy}") from None


def _write_shards(
    folder: Path, split: str, documents: list[Document], tokenizer: Tokenizer, end: int, shard_tokens: int
) -> list[dict[str, Any]]:
    encoded = tokenizer.encode_batch_fast([document.text for document in documents], add_special_tokens=False)
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
    tokens = np.concatenate([np.asarray([*encoding.ids, end], dtype=dtype) for encoding in encoded])
    shards = []
    for index, start in enumerate(range(0, len(tokens), shard_tokens)):
        part = tokens[start : start + shard_tokens]
        name = f"{split}-{index:05d}.npy"
        np.save(folder / name, part)
        shards.append({"file": name, "tokens": len(part)})
    return shards


# --- reading ------------------------------------------------------------------------------------------------------------------------


class TokenShards:
    """The memory-mapped shards of one split, seen as `len()` windows of `window` + 1 tokens that overlap by one token.

    Raises DataError naming the file if a shard is missing, empty, truncated or not what `dataset.json` says.
    """

    def __init__(self, folder: Path, split: str, window: int) -> None:
        self.window = window
        self.paths, self.shards = [], []
        for entry in _read_index(folder, split):
            self.paths.append(folder / entry["file"])
            self.shards.append(_open_shard(self.paths[-1], entry["tokens"]))
        counts = [max(0, (len(shard) - 1) // window) for shard in self.shards]
        self.first_window = np.concatenate([[0], np.cumsum(counts)])
        if not len(self):
            longest = max((len(shard) for shard in self.shards), default=0)
            raise DataError(
                f"{folder}: no {split} shard holds a window of {window + 1} tokens (the longest has {longest}): "
                "lower train.sequence_length, raise data.shard_tokens or give more text"
            )

    def __len__(self) -> int:
        return int(self.first_window[-1])

    def windows(self, indices: Sequence[int] | npt.NDArray[np.int64], vocab_size: int) -> Int[Tensor, "b s"]:
        """The windows of these indices as int64; a token outside the vocabulary is reported with its shard."""
        rows = np.empty((len(indices), self.window + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            shard = int(np.searchsorted(self.first_window, index, side="right")) - 1
            start = (int(index) - int(self.first_window[shard])) * self.window
            row[:] = self.shards[shard][start : start + self.window + 1]
            if row.max() >= vocab_size:
                raise DataError(
                    f"{self.paths[shard]}: token {row.max()} at or after position {start} is outside the vocabulary ({vocab_size}): "
                    f"the shard is damaged; delete {self.paths[shard].parent} to make the data set anew"
                )
        return torch.from_numpy(rows)


def _read_index(folder: Path, split: str) -> list[dict[str, Any]]:
    path = folder / "dataset.json"
    try:
        index = json.loads(path.read_text())
        if index["format"] != FORMAT:
            raise DataError(f"{path}: format {index['format']} is not {FORMAT}: delete {folder} to make the data set anew")
        entries = [{"file": str(entry["file"]), "tokens": int(entry["tokens"])} for entry in index["splits"][split]]
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: missing or damaged ({error}): delete {folder} to make the data set anew") from None
    return entries


def _open_shard(path: Path, tokens: int) -> npt.NDArray[Any]:
    remedy = f"delete {path.parent} to make the data set anew"
    if not path.exists():
        raise DataError(f"{path}: token shard is missing: {remedy}")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: token shard is empty: {remedy}")
    try:
        shard: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(shard, np.ndarray):
            raise ValueError("an archive")
    except Exception as error:  # numpy's reader raises whatever a damaged header makes it stumble over
        raise DataError(f"{path}: token shard is truncated or damaged ({error}): {remedy}") from None
    if shard.shape != (tokens,) or shard.dtype not in (np.uint16, np.uint32):
        raise DataError(f"{path}: token shard holds {shard.shape} {shard.dtype}, but dataset.json says {tokens} tokens: {remedy}")
    return shard


class Batches:
    """Training batches as a function of the step: windows without replacement, in an order drawn anew for every epoch."""

    def __init__(self, shards: TokenShards, batch_size: int, seed: int, vocab_size: int) -> None:
        self.shards, self.batch_size, self.seed, self.vocab_size = shards, batch_size, seed, vocab_size
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> Int[Tensor, "b s"]:
        """The tokens of step 1, 2, ..., (batch_size, window + 1). A batch may span two epochs; no window is dropped."""
        positions = range((step - 1) * self.batch_size, step * self.batch_size)
        indices = [int(self._epoch(position // len(self.shards))[position % len(self.shards)]) for position in positions]
        return self.shards.windows(indices, self.vocab_size)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order[0] != epoch:
            self._order = epoch, np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.shards))
        return self._order[1]
