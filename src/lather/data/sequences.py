"""The sequences of a split: inputs and labels of a fixed length, by number.

Either the stream of tokens is cut into windows, or whole documents are packed into sequences by
best fit. Then only documents longer than a sequence are cut, and each chunk, longest first, goes to
the fullest sequence that has room for it ("Fewer Truncations Improve Language Modeling", Ding et
al., 2024). Chunks of equal length are placed together, so that the time grows with the number of
different lengths, not with the number of documents. A run packs at its start, which takes about a
second for a million documents.

S is the length of a sequence; a label is the token after its input.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lather.data.shards import Array, ShardReader
from lather.data.token_columns import PAIRS, TOKEN_COLUMNS
from lather.errors import DataError

IGNORE_INDEX = -100
"""Label of a position that the loss leaves out."""
PADDING = -1
"""Input of a position that holds no token."""
CHUNK = np.dtype([("start", "<i8"), ("length", "<i4")])
"""A chunk of a document: the place of its first token in the split, and its number of labels."""


class SequenceArrays(NamedTuple):
    """The arrays that a sequence is written into, one element per position."""

    inputs_S: Array
    """Initialized to `PADDING`."""
    labels_S: Array
    """Initialized to `IGNORE_INDEX`."""
    begins_S: Array
    """Initialized to False; True at the first token of a document that must not attend to earlier
    tokens."""
    columns: Mapping[str, Array]
    """Values of token columns, (S, ...) by name; initialized to those of tokens that lack them."""

    def behind(self, place: int) -> SequenceArrays:
        """Return the positions from `place` on."""
        inputs_S, labels_S, begins_S, columns = self
        columns = {name: values[place:] for name, values in columns.items()}
        return SequenceArrays(inputs_S[place:], labels_S[place:], begins_S[place:], columns)


class Sequences(Protocol):
    """The sequences of a split."""

    length: int
    is_per_document: bool
    """Whether attention stays within documents."""

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """The split's token columns: shape of a token's value, by name."""

    def __len__(self) -> int: ...

    def num_tokens(self, index: int) -> int:
        """Return the number of inputs of a sequence, without padding."""

    def num_labels(self, index: int) -> int | None:
        """Return the number of labels of a sequence; None: not known before it is read."""

    def documents(self, index: int) -> list[int]:
        """Return the numbers of the documents in a sequence, counted from 0 in the split."""

    def fill(self, index: int, to: SequenceArrays) -> None:
        """Write a sequence."""


class Windows:
    """The tokens of a split, cut every S tokens across the ends of documents: each token except the
    first is a label in one sequence. The last sequence may be shorter."""

    def __init__(self, reader: ShardReader, length: int, *, is_per_document: bool = False) -> None:
        """Raises DataError if there are fewer than 2 tokens."""
        self.reader, self.length, self.is_per_document = reader, length, is_per_document
        self.columns = reader.columns
        if not len(self):
            raise DataError(
                f"{reader.folder}: {len(reader)} tokens are too few for a sequence: give more text"
            )

    def __len__(self) -> int:
        return max(0, -(-(len(self.reader) - 1) // self.length))

    def num_tokens(self, index: int) -> int:
        return min(self.length, len(self.reader) - 1 - index * self.length)

    def num_labels(self, index: int) -> int | None:
        return None if self.reader.has_mask else self.num_tokens(index)

    def documents(self, index: int) -> list[int]:
        start = index * self.length
        first, last = map(self.reader.document_at, (start, start + self.num_tokens(index) - 1))
        return [*range(first, last + 1)]

    def fill(self, index: int, to: SequenceArrays) -> None:
        start = index * self.length
        stop = min(start + self.length + 1, len(self.reader))
        _fill(self.reader, start, stop, to)
        if self.is_per_document:
            ends = self.reader.ends_between(start, min(stop, start + self.length) - 1)
            to.begins_S[ends - start] = True


class PackedDocuments:
    """Whole documents packed into sequences; attention stays within each document."""

    is_per_document = True

    def __init__(self, reader: ShardReader, length: int) -> None:
        """Raises DataError if no document has two tokens."""
        self.reader, self.length, self.columns = reader, length, reader.columns
        self._chunks, self._starts = pack(reader, length)
        if not len(self):
            raise DataError(f"{reader.folder}: no document has two tokens: give more text")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def num_tokens(self, index: int) -> int:
        return int(self._chunks_of(index)["length"].sum())

    def num_labels(self, index: int) -> int | None:
        return None if self.reader.has_mask else self.num_tokens(index)

    def _chunks_of(self, index: int) -> npt.NDArray[np.void]:
        return self._chunks[int(self._starts[index]) : int(self._starts[index + 1])]

    def documents(self, index: int) -> list[int]:
        return [self.reader.document_at(int(start)) for start in self._chunks_of(index)["start"]]

    def fill(self, index: int, to: SequenceArrays) -> None:
        place = 0
        for chunk in self._chunks_of(index):
            start, labels = int(chunk["start"]), int(chunk["length"])
            _fill(self.reader, start, start + labels + 1, to.behind(place))
            to.begins_S[place] = True
            place += labels
        if place < self.length:
            to.begins_S[place] = True


def _fill(reader: ShardReader, start: int, stop: int, to: SequenceArrays) -> None:
    """Write the tokens from `start` until `stop` of the split as the first inputs and labels, and
    their values in the token columns."""
    tokens, length = reader.tokens(start, stop), stop - start - 1
    to.inputs_S[:length], to.labels_S[:length] = tokens[:-1], tokens[1:]
    if reader.has_mask:
        to.labels_S[:length][~reader.learned(start + 1, stop)] = IGNORE_INDEX
    for name, x_Sx in to.columns.items():
        behind = int(TOKEN_COLUMNS[name].is_of_label)
        x_Sx[:length] = reader.column(name, start + behind, stop - 1 + behind)


# --- packing --------------------------------------------------------------------------------------


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.int32]:
    """Return the number of the bin of each item, for items of length 1 to `capacity` and bins of
    size `capacity`."""
    bins = np.empty(len(lengths), dtype=np.int32)
    by_length = np.argsort(-lengths.astype(np.int32), kind="stable").astype(np.int64)
    starts = np.flatnonzero(np.diff(lengths[by_length], prepend=-1))
    open_bins: dict[int, list[npt.NDArray[np.int32]]] = {}  # by the room left in them
    rooms: list[int] = []  # the keys of `open_bins`, sorted
    num_bins = 0
    for start, stop in pairwise([*starts, len(lengths)]):
        length, items = int(lengths[by_length[start]]), by_length[start:stop]
        while len(items):
            fullest = bisect_left(rooms, length)
            room = rooms.pop(fullest) if fullest < len(rooms) else capacity
            each = room // length
            needed = -(-len(items) // each)
            if room in open_bins:
                ids = np.concatenate(open_bins.pop(room))
            else:
                ids = np.arange(num_bins, num_bins + needed, dtype=np.int32)
                num_bins += needed
            ids, rest = ids[:needed], ids[needed:]
            placed = min(len(items), len(ids) * each)
            bins[items[:placed]] = np.repeat(ids, each)[:placed]
            items = items[placed:]
            partly = placed - (len(ids) - 1) * each  # items in the last bin
            for open_ids, left in (
                (rest, room),
                (ids[:-1], room - each * length),
                (ids[-1:], room - partly * length),
            ):
                if len(open_ids) and left:
                    if left not in open_bins:
                        insort(rooms, left)
                    open_bins.setdefault(left, []).append(open_ids)
    return bins


def pack(reader: ShardReader, length: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Return the chunks of all documents, sorted by sequence, and the index of each sequence's
    first chunk, followed by the number of chunks. The documents of a pair are not cut, and go to
    the same sequence. Raises DataError if that is too short, or if some documents have no pair."""
    are_pairs = PAIRS in reader.columns
    longest = np.iinfo(np.int32).max if are_pairs else length
    chunks = np.concatenate(
        [
            np.empty(0, CHUNK),
            *(_chunks(reader, shard, longest) for shard in range(len(reader.entries))),
        ]
    )
    if are_pairs:
        if not all(PAIRS in entry.columns for entry in reader.entries):
            raise DataError(f"{reader.folder}: only some rows are pairs: make a data set of each")
        lengths = chunks["length"].reshape(-1, 2).sum(1)
        if (most := int(lengths.max())) > length:
            raise DataError(
                f"{reader.folder}: a pair has {most:,} tokens: give train.sequence_length as many"
            )
        bins = np.repeat(best_fit(lengths, length), 2)
    else:
        bins = best_fit(chunks["length"], length)
    order = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[order], np.arange(int(bins.max(initial=-1)) + 2))
    return chunks[order], starts.astype(np.int64)


def _chunks(reader: ShardReader, shard: int, length: int) -> npt.NDArray[np.void]:
    """Return the chunks of a shard's documents. Tokens after the end of the last document are a
    document, too."""
    start, stop = reader.starts[shard : shard + 2].tolist()
    ends = np.append(reader.ends_between(start, stop), stop)
    firsts = np.concatenate([[start], ends[:-1]])
    labels = ends - firsts - 1  # the first token of a document is not a label
    firsts, labels = firsts[labels > 0], labels[labels > 0]
    counts = -(-labels // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.empty(len(number), CHUNK)
    chunks["start"] = np.repeat(firsts, counts) + number * length
    chunks["length"] = np.minimum(np.repeat(labels, counts) - number * length, length)
    return chunks
