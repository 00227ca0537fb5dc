"""The sequences of a split: inputs and labels of a fixed length, by number.

S is the length of a sequence; a label is the token after its input.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lather.data.packing import CHUNK, pack
from lather.data.shards import ShardReader
from lather.errors import DataError
from lather.files import reason

IGNORE_INDEX = -100
"""Label of a position that the loss leaves out."""


@dataclass(frozen=True)
class SequenceRows:
    """Arrays that are filled with one sequence."""

    inputs_S: npt.NDArray[np.int64]
    labels_S: npt.NDArray[np.int64]
    begins_S: npt.NDArray[np.bool_]
    """True at the first token of a document that must not attend to earlier tokens."""


class Sequences(Protocol):
    """The sequences of a split."""

    length: int

    def __len__(self) -> int: ...

    def num_labels(self, index: int) -> int | None:
        """Return the number of labels of a sequence; None: not known before it is read."""

    def fill(self, index: int, rows: SequenceRows) -> None:
        """Write a sequence into `rows`, which are initialized to input 0, label `IGNORE_INDEX` and False."""


class Windows:
    """The tokens of a split, cut every S tokens across the ends of documents: each token except the first is a label in one sequence. The
    last sequence may be shorter."""

    def __init__(self, reader: ShardReader, length: int, *, apart: bool = False) -> None:
        """`apart`: attention stays within documents. Raises DataError if there are fewer than 2 tokens."""
        self.reader, self.length, self.apart = reader, length, apart
        if not len(self):
            raise DataError(f"{reader.folder}: {len(reader)} tokens are too few for a sequence: give more text")

    def __len__(self) -> int:
        return max(0, -(-(len(self.reader) - 1) // self.length))

    def num_labels(self, index: int) -> int | None:
        return None if self.reader.has_mask else min(self.length, len(self.reader) - 1 - index * self.length)

    def fill(self, index: int, rows: SequenceRows) -> None:
        start = index * self.length
        stop = min(start + self.length + 1, len(self.reader))
        _fill(self.reader, start, stop, 0, rows)
        if self.apart:
            ends = self.reader.ends_between(start, min(stop, start + self.length) - 1)
            rows.begins_S[ends - start] = True


class PackedDocuments:
    """Whole documents packed into sequences; attention stays within each document."""

    def __init__(self, reader: ShardReader, length: int, chunks: npt.NDArray[np.void], starts: npt.NDArray[np.int64]) -> None:
        self.reader, self.length, self._chunks, self._starts = reader, length, chunks, starts
        if not len(self):
            raise DataError(f"{reader.folder}: no document has two tokens: give more text")

    @classmethod
    def open(cls, reader: ShardReader, split: str, length: int) -> PackedDocuments:
        """Open the packing that is kept in the data set's folder; compute it first if it is missing.

        Raises DataError if it cannot be written.
        """
        folder = reader.folder / f"packed-{split}-{length}"
        if not folder.exists():
            _keep(folder, *pack(reader, length))
        try:
            chunks, starts = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ("chunks.npy", "starts.npy"))
            if chunks.dtype != CHUNK or starts.dtype != np.int64 or int(starts[-1]) != len(chunks):
                raise ValueError("its parts do not fit")
        except Exception as error:  # numpy's reader raises errors of many types for damaged headers
            raise DataError(f"{folder}: damaged ({error}): delete it, and it is made again") from None
        return cls(reader, length, chunks, starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def num_labels(self, index: int) -> int | None:
        return None if self.reader.has_mask else int(self._of(index)["length"].sum())

    def _of(self, index: int) -> npt.NDArray[np.void]:
        return self._chunks[int(self._starts[index]) : int(self._starts[index + 1])]

    def fill(self, index: int, rows: SequenceRows) -> None:
        place = 0
        for chunk in self._of(index):
            start, labels = int(chunk["start"]), int(chunk["length"])
            _fill(self.reader, start, start + labels + 1, place, rows)
            rows.begins_S[place] = True
            place += labels
        if place < self.length:
            rows.begins_S[place] = True


def _fill(reader: ShardReader, start: int, stop: int, place: int, rows: SequenceRows) -> None:
    """Write the tokens from `start` until `stop` of the split as inputs and labels from `place` on."""
    tokens = reader.tokens(start, stop)
    rows.inputs_S[place : place + len(tokens) - 1] = tokens[:-1]
    labels_S = rows.labels_S[place : place + len(tokens) - 1]
    labels_S[:] = tokens[1:]
    if reader.has_mask:
        labels_S[~reader.learned(start + 1, stop)] = IGNORE_INDEX


def _keep(folder: Path, chunks: npt.NDArray[Any], starts: npt.NDArray[Any]) -> None:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        aside.mkdir()
        np.save(aside / "chunks.npy", chunks)
        np.save(aside / "starts.npy", starts)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not folder.exists():  # otherwise another process was faster
            why = reason(error, folder)
            raise DataError(f"{folder} cannot be written ({why}): make the data set's folder writable, free space, or copy it") from None
