"""Whole documents to sequences of a fixed length, by best fit.

Documents are cut only if they are longer than a sequence; then the pieces, longest first, each go to the fullest sequence that has room
("Fewer Truncations Improve Language Modeling", Ding et al., 2024). Pieces of one length are placed together, so that the time grows with
the number of different lengths and not of documents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lather.data.shards import ShardReader

CHUNK = np.dtype([("start", "<i8"), ("length", "<i4")])
"""A piece of a document: its first token in the split's stream, and how many labels it has."""


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.int32]:
    """The bin of each item, for items of 1 to `capacity` and bins that hold `capacity`; bins are counted from 0.

    Raises ValueError if an item is longer than a bin, or empty.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} are not from 1 to {capacity}")
    bins = np.empty(len(lengths), dtype=np.int32)
    by_length = np.argsort(-lengths.astype(np.int32), kind="stable").astype(np.int64)
    starts = np.flatnonzero(np.diff(lengths[by_length], prepend=-1))
    open_bins: dict[int, list[npt.NDArray[np.int32]]] = {}  # by the room that is left
    rooms, num_bins = 0, 0  # `rooms`: the bit of every room that some open bin has
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
    """The pieces of all documents, sequence by sequence, and where each sequence's pieces begin, and the last one's end."""
    chunks = np.concatenate([np.empty(0, CHUNK), *(_chunks(reader, shard, length) for shard in range(len(reader.entries)))])
    bins = best_fit(chunks["length"], length)
    order = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[order], np.arange(int(bins.max(initial=-1)) + 2))
    return chunks[order], starts.astype(np.int64)


def _chunks(reader: ShardReader, shard: int, length: int) -> npt.NDArray[np.void]:
    """The pieces of a shard's documents; what follows the last document's end in it is one, too."""
    ends = np.append(reader.ends(shard), reader.entries[shard].tokens)
    firsts = np.concatenate([[0], ends[:-1]])
    labels = ends - firsts - 1  # the first token of a document is no label
    firsts, labels = firsts[labels > 0], labels[labels > 0]
    counts = -(-labels // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.empty(len(number), CHUNK)
    chunks["start"] = int(reader.starts[shard]) + np.repeat(firsts, counts) + number * length
    chunks["length"] = np.minimum(np.repeat(labels, counts) - number * length, length)
    return chunks
