"""From data sets to batches: sequences and batches are right on any number of ranks, and the same
at every start."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lather.data.batch_sizes import BatchSizes
from lather.data.batches import Batch, Batches, HeldOut, Source, read_batch
from lather.data.order import MixturePhase, Order
from lather.data.sequences import IGNORE_INDEX, PackedDocuments, Sequences, Windows
from lather.data.shards import ShardReader, ShardWriter
from lather.errors import DataError


def hand_made(
    folder: Path,
    *documents: list[int],
    shard_tokens: int = 10**6,
    learned: list[list[bool]] | None = None,
) -> ShardReader:
    """Write the documents as shards."""
    folder.mkdir(exist_ok=True)
    dtype, is_masked = np.dtype(np.uint16), learned is not None
    writer = ShardWriter(folder, "train", dtype, shard_tokens, masked=is_masked)
    for number, document in enumerate(documents):
        writer.write(np.array(document), None if learned is None else np.array(learned[number]))
        writer.end_document()
    writer.finish()
    return ShardReader(folder, writer.entries, dtype)


def rows_of(sequences: Sequences) -> Batch:
    samples = [(0, index) for index in range(len(sequences))]
    return read_batch([Source("these", sequences, 2**16)], samples)


# --- sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 8, 100])
@pytest.mark.parametrize("shard_tokens", [1, 7, 10**6])
def test_windows_cover_the_stream_across_shards(
    tmp_path: Path, length: int, shard_tokens: int
) -> None:
    """Every token but the first is a label once, and its input is the token before it."""
    documents = [list(range(9)), list(range(9, 12)), list(range(12, 41))]
    reader = hand_made(tmp_path / "shards", *documents, shard_tokens=shard_tokens)
    windows = Windows(reader, length)
    batch = rows_of(windows)
    is_label = batch.labels_BS != IGNORE_INDEX
    assert batch.labels_BS[is_label].tolist() == list(range(1, 41))
    assert batch.inputs_BS[is_label].tolist() == list(range(40))
    assert is_label[:-1].all()
    assert sum(windows.num_labels(index) or 0 for index in range(len(windows))) == 40


def test_windows_mark_where_documents_begin(tmp_path: Path) -> None:
    """Marks do not depend on the token that ends a document, nor on shards."""
    reader = hand_made(tmp_path / "shards", [5, 5, 0], [6, 9], [7, 7, 7, 7, 0], shard_tokens=3)
    batch = rows_of(Windows(reader, 5, is_per_document=True))
    assert batch.begins_BS is not None
    assert batch.inputs_BS.tolist() == [[5, 5, 0, 6, 9], [7, 7, 7, 7, 0]]
    assert batch.begins_BS.int().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]


def test_packed_sequences_hold_whole_documents(tmp_path: Path) -> None:
    documents = [
        [10 * number + place for place in range(length)]
        for number, length in enumerate([4, 9, 2, 6, 3, 5, 1, 8, 26], 1)
    ]
    reader = hand_made(tmp_path / "shards", *documents, shard_tokens=12)
    packed = PackedDocuments(reader, 8)
    batch = rows_of(packed)
    assert batch.begins_BS is not None
    pieces = []
    rows = zip(batch.inputs_BS, batch.labels_BS, batch.begins_BS, strict=True)
    for inputs, labels, begins in rows:
        bounds = [*begins.nonzero().flatten().tolist(), 8]
        for low, high in itertools.pairwise(bounds):
            if labels[low] != IGNORE_INDEX:
                pieces.append([int(inputs[low]), *labels[low:high].tolist()])
    whole = [document for document in documents if 2 <= len(document) <= 9]
    cut = [documents[-1][start : start + 9] for start in range(0, 25, 8)]
    assert sorted(pieces) == sorted([*whole, *cut])
    assert len(batch.inputs_BS) == -(-sum(len(document) - 1 for document in documents) // 8)
    assert sum(packed.num_labels(index) or 0 for index in range(len(packed))) == batch.num_labels


def test_what_is_not_learned_is_no_label(tmp_path: Path) -> None:
    learned = [[False, False, True, True], [True, True]]
    reader = hand_made(tmp_path / "shards", [1, 2, 3, 4], [5, 6], learned=learned)
    windows, packed = Windows(reader, 8), PackedDocuments(reader, 8)
    for sequences, labels in ((windows, {3, 4, 5, 6}), (packed, {3, 4, 6})):
        assert sequences.num_labels(0) is None
        assert set(rows_of(sequences).labels_BS.flatten().tolist()) == labels | {IGNORE_INDEX}


def test_padding_is_where_no_token_is(tmp_path: Path) -> None:
    """A token that is not learned is none. Windows are padded at the end of the stream, packed
    documents at the end of sequences."""
    learned = [[False] * 4, [True] * 3]
    reader = hand_made(tmp_path / "shards", [0, 2, 0, 4], [5, 6, 0], learned=learned)
    windows, packed = Windows(reader, 4), PackedDocuments(reader, 4)
    for sequences, expected in ((windows, [4, 2]), (packed, [3, 2])):
        batch = rows_of(sequences)
        assert batch.padding_BS is not None
        assert [sequences.num_tokens(index) for index in range(2)] == expected
        assert batch.tokens_of_parts(1) == expected
        rows = [[False] * count + [True] * (4 - count) for count in expected]
        assert batch.padding_BS.tolist() == rows
        assert not batch.inputs_BS[batch.padding_BS].any()
        assert batch.num_tokens == sum(expected) > batch.num_labels
    assert rows_of(Windows(reader, 6)).padding_BS is None
    assert rows_of(Windows(reader, 6)).num_tokens == 6


def test_rows_that_a_rank_lacks_are_padding(tmp_path: Path) -> None:
    source = Source("held out", Windows(hand_made(tmp_path / "shards", list(range(13))), 4), 2**16)
    shares = [HeldOut(source, 3).batch(rank, 2) for rank in range(2)]
    assert shares[0].padding_BS is None
    assert shares[1].padding_BS is not None
    assert shares[1].padding_BS.tolist() == [[False] * 4, [True] * 4]
    assert [share.num_tokens for share in shares] == [8, 4]
    made = Batch.of_tokens(torch.tensor([[3, 4, 5], [6, IGNORE_INDEX, IGNORE_INDEX]]))
    assert made.padding_BS is not None
    assert made.padding_BS.tolist() == [[False, False], [False, True]]
    assert (made.num_labels, made.num_tokens) == (2, 3)


def test_a_depth_sees_the_columns_of_its_labels() -> None:
    batch = Batch.of_tokens(torch.arange(12).view(2, 6))
    columns = {
        "weights": torch.arange(1, 11, dtype=torch.float32).view(2, 5),
        "routing": torch.arange(10).view(2, 5, 1, 1),
    }
    batch = replace(batch, columns=columns)
    for depth in (1, 2):
        ahead = batch.ahead(depth)
        assert set(ahead.columns) == {"weights"}  # the blocks' routers choose
        is_label = ahead.labels_BS != IGNORE_INDEX
        assert is_label.sum(1).tolist() == [5 - depth] * 2
        for row, position in is_label.nonzero().tolist():
            (place,) = (batch.labels_BS[row] == ahead.labels_BS[row, position]).nonzero()
            expected = batch.columns["weights"][row, place].item()
            assert ahead.columns["weights"][row, position] == expected
        assert (ahead.columns["weights"][~is_label] == 1).all()


def test_documents_of_one_token_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document has two tokens: give more text"):
        PackedDocuments(hand_made(tmp_path / "short", [1], [2]), 8)


# --- batches --------------------------------------------------------------------------------------


def batches_of(
    tmp_path: Path,
    batch_size: int,
    seed: int = 0,
    phases: tuple[MixturePhase, ...] = (MixturePhase(0),),
) -> Batches:
    documents = {"a": list(range(41)), "b": list(range(1000, 1081))}
    sources = [
        Source(name, Windows(hand_made(tmp_path / name, tokens), 4), 2**16)
        for name, tokens in documents.items()
    ]
    return Batches(
        sources, Order([len(source) for source in sources], seed, phases), BatchSizes(batch_size)
    )


@pytest.mark.parametrize("batch_size", [1, 4, 7, 50])
def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path, batch_size: int) -> None:
    used = batches_of(tmp_path, batch_size, 3)
    for step in (9, 1, 4, 9, 2, 30, 1):
        fresh = batches_of(tmp_path, batch_size, 3).batch(step)
        assert used.batch(step).labels_BS.equal(fresh.labels_BS)
        assert used.batch(step).inputs_BS.equal(fresh.inputs_BS)
    first, second = (batches_of(tmp_path, 30, seed).batch(1).labels_BS for seed in (3, 4))
    assert not first.equal(second)


@pytest.mark.parametrize(
    "phases",
    [(MixturePhase(0),), (MixturePhase(0, (1, 3)),), (MixturePhase(0), MixturePhase(100, (1, 1)))],
)
def test_ranks_share_a_batch_whatever_their_number(
    tmp_path: Path, phases: tuple[MixturePhase, ...]
) -> None:
    batches = batches_of(tmp_path, 12, phases=phases)
    for step in (1, 5, 11):
        whole = batches.batch(step)
        for ranks in (2, 3, 4, 12):
            shares = [batches.batch(step, rank, ranks) for rank in range(ranks)]
            assert torch.cat([share.labels_BS for share in shares]).equal(whole.labels_BS)
            assert {share.labels_of_all for share in shares} == {whole.num_labels}
            assert {share.tokens_of_all for share in shares} == {whole.num_tokens}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (BatchSizes(12), [12, 12, 12]),
        (BatchSizes(12, 4, 6), [4, 4, 4, 8, 8, 8, 12, 12]),
        (BatchSizes(12, 4, 3), [4, 4, 8, 12, 12]),
        (BatchSizes(12, 4, 1), [4, 12, 12]),  # without the second stage
        (BatchSizes(12, 2, 3), [2, 4, 8, 12]),
        (BatchSizes(4, 2, 3), [2, 2, 2, 4]),
    ],
    ids=str,
)
def test_a_batch_grows_and_no_sequence_is_left_out(
    tmp_path: Path, sizes: BatchSizes, expected: list[int]
) -> None:
    steps = range(1, len(expected) + 1)
    assert [sizes.of(step) for step in steps] == expected
    assert [sizes.before(step) for step in steps] == [sum(expected[: step - 1]) for step in steps]
    assert sizes.before(1000) - sizes.before(900) == 100 * sizes.full
    batches = batches_of(tmp_path, 1, seed=3)
    rows = [batches.batch(number).labels_BS for number in range(1, sum(expected) + 1)]
    batches.sizes = sizes
    for ranks in (1, 2):
        shares = [batches.batch(step, rank, ranks) for step in steps for rank in range(ranks)]
        assert torch.cat([share.labels_BS for share in shares]).equal(torch.cat(rows))
        assert [share.tokens_of_all for share in shares[::ranks]] == [4 * n for n in expected]


@pytest.mark.parametrize("seed", range(5))
def test_every_document_comes_once_in_an_epoch_wherever_20_starts_go_on_and_on_a_changing_mesh(
    tmp_path: Path, seed: int
) -> None:
    """Every start goes on from the newest checkpoint with another number of ranks. What a kill has
    undone does not count."""
    draw, documents = random.Random(seed), 240
    reader = hand_made(
        tmp_path / "many",
        *[[token] * (3 + token % 9) for token in range(documents)],
        shard_tokens=100,
    )
    source = Source("many", PackedDocuments(reader, 16), documents)
    steps = -(-len(source) // 12)
    seen: dict[int, list[torch.Tensor]] = {}  # the samples of each step
    step, kills = 0, 0
    while step < steps:
        # made anew, as a fresh process makes them
        batches = Batches([source], Order([len(source)], seed), BatchSizes(12))
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
    rows = [labels_BS for number in sorted(seen) for labels_BS in seen[number]]
    labels = torch.cat(rows)[: len(source)]
    counts = torch.bincount(labels[labels != IGNORE_INDEX], minlength=documents)
    assert counts.tolist() == [2 + token % 9 for token in range(documents)]


def test_a_rank_reads_only_its_own_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, read = batches_of(tmp_path, 12), []
    fill = Windows.fill
    monkeypatch.setattr(
        Windows, "fill", lambda self, index, *rows: (read.append(index), fill(self, index, *rows))
    )
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
