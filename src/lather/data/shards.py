"""The shards of a data set: flat arrays of tokens in numpy's file format, written once as a stream
and read in short pieces.

A shard NAME consists of several files: NAME.npy, the tokens (uint16, or uint32 for vocabularies
above 65,536); NAME.ends.npy, the place after the last token of each document (int64); if only some
tokens are trained on, NAME.learned.npy, a bool for each token; and a file for each token column
that a token of the shard has. They can be memory-mapped with `numpy.load(file, mmap_mode="r")`.
This module reads them with `os.pread`, because pages of a mapped file count as memory of the
process, and a shuffle would touch all of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lather.data.token_columns import TOKEN_COLUMNS
from lather.errors import DataError
from lather.files import sha256

HEADER_BYTES = 128
"""Length of the version 1.0 header that numpy writes for an array of few dims."""
OPEN_FILES = 64
FILLED = 1 << 16
"""Tokens without a column for which its values are written at a time."""
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ShardEntry:
    """The manifest's entry of a shard."""

    name: str
    tokens: int
    documents: int
    checksums: dict[str, str]
    """SHA-256 by the file's suffix: "npy", "ends.npy", "learned.npy", and NAME.npy of a column."""

    @property
    def has_mask(self) -> bool:
        return "learned.npy" in self.checksums

    @property
    def columns(self) -> list[str]:
        """The token columns that the shard has."""
        return [name for name in TOKEN_COLUMNS if f"{name}.npy" in self.checksums]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


# --- writing --------------------------------------------------------------------------------------


class _ArrayFile:
    """A .npy file that grows; its header is written at the end, when the length is known."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> None:
        """`shape`: of an entry."""
        self.path, self.dtype, self.shape, self.length = path, np.dtype(dtype), shape, 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, values: Array) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def finish(self) -> str:
        """Write the header, sync the file to the disk, and return its checksum."""
        self._file.seek(0)
        shape = (self.length, *self.shape)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return sha256(self.path)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # the disk may be too full for the buffer
            self._file.close()
        self.path.unlink(missing_ok=True)


@dataclass
class ShardWriter:
    """Writes the documents of one unit and one split to shards `<prefix>-000`, `<prefix>-001`, ...;
    a shard is closed after the document with which it reaches `shard_tokens` tokens."""

    folder: Path
    prefix: str
    dtype: np.dtype[Any]
    shard_tokens: int
    masked: bool = False
    """True if each token has a mark that says whether it is trained on."""
    entries: list[ShardEntry] = field(default_factory=list)
    _files: dict[str, _ArrayFile] = field(default_factory=dict)

    def write(
        self,
        tokens: Array,
        learned: Array | None = None,
        columns: Mapping[str, Array] | None = None,
    ) -> None:
        """Append a part of a document. `columns`: values of its tokens, (T, ...) by name. Raises
        DataError if those of a token have another shape than before."""
        arrays = {"npy": tokens, "ends.npy": np.empty(0, np.int64)}
        if self.masked:
            all_learned = np.ones(len(tokens), bool)
            arrays["learned.npy"] = all_learned if learned is None else learned.astype(bool)
        for suffix, values in arrays.items():
            if suffix not in self._files:
                dtype = self.dtype if suffix == "npy" else values.dtype
                self._files[suffix] = _ArrayFile(self._path(suffix), dtype)
            self._files[suffix].append(values)
        given = columns or {}
        for name in TOKEN_COLUMNS:
            if name in given or f"{name}.npy" in self._files:
                self._write_column(name, given.get(name))

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.prefix}-{len(self.entries):03d}.{suffix}"

    def _write_column(self, name: str, values: Array | None) -> None:
        """Append the values of the tokens that were written last; None: they lack the column."""
        column, suffix = TOKEN_COLUMNS[name], f"{name}.npy"
        if values is not None and suffix not in self._files:
            shape = values.shape[1:]
            self._files[suffix] = _ArrayFile(self._path(suffix), column.dtype, shape)
        file, length = self._files[suffix], self._files["npy"].length
        if values is not None and values.shape[1:] != file.shape:
            raise DataError(
                f"{name} has shape {values.shape[1:]} per token in a document, and {file.shape} in "
                "one before: make a data set of each"
            )
        stop = length - (0 if values is None else len(values))
        while (rest := stop - file.length) > 0:
            file.append(np.full((min(rest, FILLED), *file.shape), column.missing))
        if values is not None:
            file.append(values)

    def end_document(self) -> None:
        """Record the end of a document."""
        length = self._files["npy"].length
        self._files["ends.npy"].append(np.array([length]))
        if length >= self.shard_tokens:
            self.finish()

    def finish(self) -> None:
        """Complete the current shard, if there is one."""
        if self._files:
            tokens, documents = self._files["npy"], self._files["ends.npy"].length
            checksums = {suffix: file.finish() for suffix, file in sorted(self._files.items())}
            self.entries.append(ShardEntry(tokens.path.stem, tokens.length, documents, checksums))
            self._files = {}

    def abandon(self) -> None:
        """Delete the current shard."""
        for file in self._files.values():
            file.abandon()
        self._files = {}


# --- reading --------------------------------------------------------------------------------------


class _OpenFile:
    """A file that is open for reading as long as this object exists."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class ShardReader:
    """The tokens of a split, as one stream over its shards.

    Raises DataError, with the path, if a file is missing or has another length than in the
    manifest. Checksums are verified only by `lather data check`.
    """

    def __init__(self, folder: Path, entries: list[ShardEntry], dtype: np.dtype[Any]) -> None:
        self.folder, self.entries, self.dtype = folder, entries, dtype
        self.starts = np.concatenate(
            [[0], np.cumsum([entry.tokens for entry in entries], dtype=np.int64)]
        )
        documents = np.cumsum([entry.documents for entry in entries], dtype=np.int64)
        self._documents_before = np.concatenate([[0], documents])
        self.has_mask = any(entry.has_mask for entry in entries)
        self.columns: dict[str, tuple[int, ...]] = {}
        """Shape of a token's value in each column, by name."""
        self._open = lru_cache(OPEN_FILES)(_OpenFile)
        for entry in entries:
            self._add_columns(entry)
            self._check(entry)

    def __len__(self) -> int:
        """Return the number of tokens in the split."""
        return int(self.starts[-1])

    def tokens(self, start: int, stop: int) -> Array:
        """Read the tokens from `start` until `stop` of the stream."""
        return self._read(start, stop, "npy", self.dtype)

    def learned(self, start: int, stop: int) -> Array:
        """Read which of these tokens are trained on."""
        return self._read(start, stop, "learned.npy", np.dtype(np.bool_))

    def column(self, name: str, start: int, stop: int) -> Array:
        """Read the values of these tokens in a column, (T, ...)."""
        column, shape = TOKEN_COLUMNS[name], self.columns.get(name, ())
        dtype = np.dtype((np.dtype(column.dtype), shape))
        return self._read(start, stop, f"{name}.npy", dtype, column.missing)

    def ends_between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ends of documents in the stream (the places after their last tokens), above
        `start` and up to `stop`."""
        parts = [np.empty(0, np.int64)]
        for shard in range(self._shard_at(start), self._shard_at(max(start, stop - 1)) + 1):
            first, ends = int(self.starts[shard]), self._ends(shard)
            low, high = np.searchsorted(ends, [start - first, stop - first], side="right")
            parts.append(ends[low:high] + first)
        return np.concatenate(parts)

    def document_at(self, position: int) -> int:
        """Return the number of the document of a token of the stream, counted from 0. Tokens after
        the end of a shard's last document have the number of the next one."""
        shard = self._shard_at(position)
        place = position - int(self.starts[shard])
        within = np.searchsorted(self._ends(shard), place, side="right")
        return int(self._documents_before[shard] + within)

    def _ends(self, shard: int) -> npt.NDArray[np.int64]:
        """Return the ends of a shard's documents, counted from its first token."""
        entry = self.entries[shard]
        if not entry.documents:
            return np.empty(0, np.int64)
        path = self.folder / f"{entry.name}.ends.npy"
        return np.memmap(path, "<i8", "r", HEADER_BYTES, (entry.documents,))

    def _read(
        self, start: int, stop: int, suffix: str, dtype: np.dtype[Any], missing: float = 1
    ) -> Array:
        parts, shard = [], self._shard_at(start)
        while start < stop:
            entry, first = self.entries[shard], int(self.starts[shard])
            length = min(stop, first + entry.tokens) - start
            if suffix in entry.checksums:
                offset = HEADER_BYTES + (start - first) * dtype.itemsize
                path = self.folder / f"{entry.name}.{suffix}"
                content = self._bytes(path, offset, length * dtype.itemsize)
                parts.append(np.frombuffer(content, dtype=dtype))
            else:
                parts.append(np.full((length, *dtype.shape), missing, dtype.base))
            start, shard = start + length, shard + 1
        empty = np.empty((0, *dtype.shape), dtype.base)
        return parts[0] if len(parts) == 1 else np.concatenate([empty, *parts])

    def _bytes(self, path: Path, offset: int, num_bytes: int) -> bytes:
        try:
            content = os.pread(self._open(path).descriptor, num_bytes, offset)
        except OSError as error:
            raise _damaged(path, f"cannot be read ({error.strerror})") from None
        if len(content) != num_bytes:
            raise _damaged(path, "is truncated")
        return content

    def _shard_at(self, position: int) -> int:
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def _add_columns(self, entry: ShardEntry) -> None:
        """Add the columns of a shard. Raises DataError if shards have values of other shapes."""
        for name in entry.columns:
            path = self.folder / f"{entry.name}.{name}.npy"
            try:
                shape = np.load(path, mmap_mode="r").shape[1:]
            except (OSError, ValueError) as error:
                raise _damaged(path, f"cannot be read ({error})") from None
            if self.columns.setdefault(name, shape) != shape:
                raise DataError(
                    f"{path}: {name} has shape {shape} per token, and {self.columns[name]} in a "
                    "shard before: make a data set of each"
                )

    def _check(self, entry: ShardEntry) -> None:
        lengths = {"npy": entry.tokens * self.dtype.itemsize, "ends.npy": entry.documents * 8}
        if entry.has_mask:
            lengths["learned.npy"] = entry.tokens
        for name in entry.columns:
            itemsize = np.dtype(TOKEN_COLUMNS[name].dtype).itemsize
            lengths[f"{name}.npy"] = entry.tokens * math.prod(self.columns[name]) * itemsize
        for suffix, num_bytes in lengths.items():
            path, expected = self.folder / f"{entry.name}.{suffix}", HEADER_BYTES + num_bytes
            try:
                size = path.stat().st_size
            except OSError as error:
                raise _damaged(path, f"is missing ({error.strerror})") from None
            if size != expected:
                fault = "empty" if not size else "truncated" if size < expected else "too long"
                raise _damaged(path, f"is {fault}: it has {size:,} bytes, not {expected:,}")


def _damaged(path: Path, fault: str) -> DataError:
    remedy = f"restore it, or delete {path.parent} to make the data set again"
    return DataError(f"{path}: token shard {fault}: {remedy}")
