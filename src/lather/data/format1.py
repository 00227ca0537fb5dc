"""Data sets in format 1, from before data sets had a document index: runs that were started with
one continue on it, in its order.

Such a data set is a folder in `data.cache_dir` with a digest of all texts in its name. Its
`dataset.json` lists shards `<split>-00000.npy` of equal length; a sequence is a window within one
shard; an epoch is numpy's permutation of all windows. A missing data set is made again, with all
texts in memory.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import ConcatDataset

from lather.data.config import DataConfig
from lather.data.dataset import MANIFEST, TOKENIZER
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.order import Order
from lather.data.recipe import DataRecipe
from lather.data.shards import Array, token_dtype
from lather.data.sources import list_files, root_of
from lather.errors import DataError
from lather.files import read_text

FORMAT = 1
Document = tuple[str, str]
"""Name and text."""


def data_set_of_format_1(
    config: DataConfig, vocab_size: int, name: str, report: Callable[[str], None]
) -> Path:
    """Return the folder of the data set of this name; make it again if it is missing. Raises
    DataError if the texts have changed."""
    folder = Path(config.cache_dir) / name
    if (folder / MANIFEST).exists():
        return folder
    documents = _read(config)
    now = f"{Path(config.source).resolve().name}-{vocab_size}-{_fingerprint(documents, config)}"
    if now != name:
        raise DataError(
            f"the run was started with the data set {name}, but data.source now gives {now}: "
            "restore the text, or give another --run-dir"
        )
    report(f"making the data set {name} again, for a run that was started with it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as temporary:
        aside = Path(temporary) / name
        aside.mkdir()
        _write(aside, documents, config, vocab_size)
        aside.rename(folder)
    return folder


def _read(config: DataConfig) -> list[Document]:
    root, documents = root_of(config.source)[0], []
    recipe = DataRecipe((config.source,), pattern=config.resolved_pattern, format="text")
    for file in list_files(config.source, recipe).files:
        try:
            text = Path(file.path).read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            documents.append((Path(file.path).relative_to(root).as_posix(), text))
    return documents


def _fingerprint(documents: Sequence[Document], config: DataConfig) -> str:
    digest = hashlib.sha256(
        json.dumps([FORMAT, config.holdout_every, config.shard_tokens]).encode()
    )
    if config.tokenizer:
        digest.update(config.end_of_text.encode())
        digest.update(Path(config.tokenizer).read_bytes())
    for name, text in documents:
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text.encode("utf-8", errors="replace"))
    return digest.hexdigest()[:12]


def _write(
    folder: Path, documents: Sequence[Document], config: DataConfig, vocab_size: int
) -> None:
    place = min(config.holdout_every, len(documents)) // 2
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for index, (_, text) in enumerate(documents):
        splits["validation" if index % config.holdout_every == place else "train"].append(text)
    if config.tokenizer:
        tokenizer = load_tokenizer(
            Path(config.tokenizer), "data.tokenizer must be a tokenizer.json, or empty"
        )
    else:
        tokenizer = train_tokenizer(iter(splits["train"]), vocab_size, config.end_of_text)
    tokenizer.save(str(folder / TOKENIZER))
    end, dtype = (
        tokenizer.token_to_id(config.end_of_text),
        token_dtype(max(tokenizer.get_vocab().values()) + 1),
    )
    entries: dict[str, list[dict[str, Any]]] = {}
    for split, texts in splits.items():
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = np.concatenate(
            [np.asarray([*encoding.ids, end], dtype=dtype) for encoding in encoded]
        )
        parts = [
            tokens[start : start + config.shard_tokens]
            for start in range(0, len(tokens), config.shard_tokens)
        ]
        entries[split] = [
            {"file": f"{split}-{number:05d}.npy", "tokens": len(part)}
            for number, part in enumerate(parts)
        ]
        for entry, part in zip(entries[split], parts, strict=True):
            np.save(folder / entry["file"], part)
    (folder / MANIFEST).write_text(
        json.dumps({"format": FORMAT, "vocab_size": vocab_size, "splits": entries}, indent=1)
    )


class ShardWindows:
    """The sequences of a split (`lather.data.sequences.Sequences`).

    Raises DataError naming the folder if the manifest or a shard is missing or damaged.
    """

    def __init__(self, folder: Path, split: str, length: int, end_token: int | None) -> None:
        """`end_token`: token that ends a document, which attention does not cross; None: attention
        crosses documents."""
        self.folder, self.length, self.end_token = folder, length, end_token
        try:
            manifest = json.loads(read_text(folder / MANIFEST))
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']}")
            entries = manifest["splits"][split]
            shards = [np.load(folder / entry["file"], mmap_mode="r") for entry in entries]
            if any(
                shard.shape != (entry["tokens"],)
                for shard, entry in zip(shards, entries, strict=True)
            ):
                raise ValueError("a shard is not as long as it was")
        except Exception as error:  # numpy's reader raises errors of many types for damaged headers
            raise DataError(
                f"{folder}: the run's data set is damaged ({error}): delete it, and it is made "
                "again"
            ) from None
        windows: Any = [
            sliding_window_view(shard, length + 1)[::length]
            for shard in shards
            if len(shard) > length
        ]
        self._windows: ConcatDataset[Array] = ConcatDataset(windows)

    def __len__(self) -> int:
        return len(self._windows)

    def num_tokens(self, index: int) -> int:
        return self.length

    def num_labels(self, index: int) -> int:
        return self.length

    def fill(self, index: int, inputs_S: Array, labels_S: Array, begins_S: Array) -> None:
        tokens = self._windows[index]
        inputs_S[:], labels_S[:] = tokens[:-1], tokens[1:]
        if self.end_token is not None:
            begins_S[1:] = inputs_S[:-1] == self.end_token


class PermutedOrder(Order):
    """The order of the only source in format 1."""

    def __init__(self, size: int, seed: int) -> None:
        """`size`: number of sequences."""
        super().__init__([size], seed)
        self._permutation = lru_cache(1)(
            lambda epoch: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)
        )

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        places = (divmod(sample, self.sizes[0]) for sample in range(start, stop))
        return [(0, int(self._permutation(epoch)[place])) for epoch, place in places]
