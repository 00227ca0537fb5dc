"""Packs whole documents into sequences of a fixed length, by best fit.

Only documents longer than a sequence are cut. Then each piece, longest first, goes to the fullest sequence that has room for it ("Fewer
Truncations Improve Language Modeling", Ding et al., 2024). Pieces of equal length are placed together, so that the time grows with the
number of different lengths, not with the number of documents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lather.data.shards import ShardReader

CHUNK = np.dtype([("start", "<i8"), ("length", "<i4")])
"""A piece of a document: the place of its first token in the split, and its number of labels."""


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.int32]:
    """Return the number of the bin of each item, for items of length 1 to `capacity` and bins of size `capacity`.

    Raises ValueError if an item is longer than a bin, or empty.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} are not from 1 to {capacity}")
    bins = np.empty(len(lengths), dtype=np.int32)
    by_length = np.argsort(-lengths.astype(np.int32), kind="stable").astype(np.int64)
    starts = np.flatnonzero(np.diff(lengths[by_length], prepend=-1))
    open_bins: dict[int, list[npt.NDArray[np.int32]]] = {}  # by the room left in them
    rooms, num_bins = 0, 0  # `rooms` is a bit mask: bit r is set if an open bin has room r
    for start, stop in zip(starts, [*starts[1:], len(lengths)], strict=True):
        length, items = int(lengths[by_length[start]]), by_length[start:stop]
        while len(items):
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = room // length
            needed = -(-len(items) // each)
            if fitting:
                ids = np.concatenate(open_bins.pop(room))
                rooms ^= 1 << room
                ids, rest = ids[:needed], ids[needed:]
                if len(rest):
                    open_bins[room] = [rest]
                    rooms |= 1 << room
            else:
                ids = np.arange(num_bins, num_bins + needed, dtype=np.int32)
                num_bins += needed
            placed = min(len(items), len(ids) * each)
            bins[items[:placed]] = np.repeat(ids, each)[:placed]
            items = items[placed:]
            partly = placed - (len(ids) - 1) * each  # items in the last bin
            for some, left in ((ids[:-1], room - each * length), (ids[-1:], room - partly * length)):
                if len(some) and left:
                    open_bins.setdefault(left, []).append(some)
                    rooms |= 1 << left
    return bins


def pack(reader: ShardReader, length: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Return the pieces of all documents, sorted by sequence, and the index of each sequence's first piece, followed by the number of
    pieces."""
    chunks = np.concatenate([np.empty(0, CHUNK), *(_chunks(reader, shard, length) for shard in range(len(reader.entries)))])
    bins = best_fit(chunks["length"], length)
    order = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[order], np.arange(int(bins.max(initial=-1)) + 2))
    return chunks[order], starts.astype(np.int64)


def _chunks(reader: ShardReader, shard: int, length: int) -> npt.NDArray[np.void]:
    """Return the pieces of a shard's documents; tokens after the end of the last document form one more document."""
    ends = np.append(reader.ends(shard), reader.entries[shard].tokens)
    firsts = np.concatenate([[0], ends[:-1]])
    labels = ends - firsts - 1  # the first token of a document is not a label
    firsts, labels = firsts[labels > 0], labels[labels > 0]
    counts = -(-labels // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.empty(len(number), CHUNK)
    chunks["start"] = int(reader.starts[shard]) + np.repeat(firsts, counts) + number * length
    chunks["length"] = np.minimum(np.repeat(labels, counts) - number * length, length)
    return chunks
