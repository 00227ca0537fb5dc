"""Bytes that a rank reads and holds of long sequences, which per token do not grow with the length.
Context ranks read whole sequences; docs/log.md (2026-11-27) has why slices would not pay."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lather.data.batch_sizes import BatchSizes
from lather.data.batches import Batches, Source
from lather.data.order import Order
from lather.data.sequences import PackedDocuments, Sequences, Windows
from lather.data.shards import ShardReader, ShardWriter

LENGTH = 2**17
TOKEN = np.dtype(np.uint32)
MOST_HELD = 22
"""Bytes per token while a batch is made: inputs and labels in int64, first tokens of documents and
padding in bool, and the tokens of one sequence as they are stored."""
KINDS: dict[str, Callable[[ShardReader, int], Sequences]] = {
    "windows": Windows,
    "windows, attention within documents": partial(Windows, is_per_document=True),
    "packed documents": PackedDocuments,
}


class CountingReader(ShardReader):
    """Counts the bytes that it reads of shards."""

    num_bytes = 0

    def _bytes(self, path: Path, offset: int, num_bytes: int) -> bytes:
        self.num_bytes += num_bytes
        return super()._bytes(path, offset, num_bytes)


@pytest.fixture
def reader(tmp_path: Path) -> CountingReader:
    """Four documents, the first as long as three sequences."""
    writer = ShardWriter(tmp_path, "train-00000", TOKEN, 10**9)
    for number, length in enumerate((3 * LENGTH + 5, LENGTH // 2, 1000, LENGTH // 3)):
        writer.write(np.full(length, number, TOKEN))
        writer.end_document()
    writer.finish()
    return CountingReader(tmp_path, writer.entries, TOKEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_batch_reads_each_token_once_and_holds_bounded_bytes_of_it(
    kind: str, batch_size: int, reader: CountingReader
) -> None:
    sequences = KINDS[kind](reader, LENGTH)
    sizes = BatchSizes(batch_size, 0, 0)
    batches = Batches([Source(kind, sequences, 4)], Order([len(sequences)], 0), sizes)
    batches.batch(1)  # opens the files
    reader.num_bytes = 0
    tracemalloc.start()
    try:
        batch = batches.batch(1)
        _, most_held = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_tokens, num_documents = batch_size * LENGTH, 4
    assert batch.inputs_BS.shape == (batch_size, LENGTH)
    # the label of a chunk's last input is read once more, as the first input of the next
    assert reader.num_bytes <= TOKEN.itemsize * (num_tokens + batch_size * num_documents)
    assert batch_size * LENGTH * 16 < most_held < MOST_HELD * num_tokens
