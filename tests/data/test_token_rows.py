"""Rows of tokens become documents, and what they say of each token arrives at its position of a
batch, whatever the shards and the packing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making_helpers import Make, documents_of, lines, skips

from lather.commands.data import describe
from lather.data import sources
from lather.data.batches import Batch, Source, read_batch
from lather.data.config import DataConfig
from lather.data.dataset import DataSet
from lather.data.opening import open_source
from lather.data.records import Record, Skip
from lather.data.sequences import IGNORE_INDEX
from lather.data.token_rows import RowError, read_rows, row_of
from lather.errors import ConfigError, DataError

LAYERS, CHOSEN = 2, 3
ROWS = {"tokenizer": "", "vocab_size": 300, "token_rows": True}


def drawn(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw rows, some of which lack a field; each token tells its place."""
    draw, rows, token = random.Random(seed), [], 0
    for number in range(count):
        length = draw.randint(1, 9)
        row: dict[str, Any] = {"tokens": list(range(token, token + length))}
        token += length
        if number % 3:
            row["weights"] = [draw.choice([0, 1, 0.5, -2.5]) for _ in range(length)]
        if number % 4 == 1:
            row["advantages"] = draw.choice([0.25, -1, 0])
        if number % 2:
            row["routing"] = [
                [draw.sample(range(40), CHOSEN) for _ in range(LAYERS)]
                for _ in range(length - number % 4 // 2)
            ]
        rows.append(row)
    return rows


def expected_of(rows: list[dict[str, Any]]) -> dict[int, tuple[bool, float, Any]]:
    """Return by token whether it is learned, its factor and its experts."""
    of_token = {}
    for row in rows:
        for place, token in enumerate(row["tokens"]):
            weight = row["weights"][place] if "weights" in row else 1
            routing = row.get("routing", [])
            experts = routing[place] if place < len(routing) else [[-1] * CHOSEN] * LAYERS
            of_token[token] = weight != 0, weight * row.get("advantages", 1), experts
    return of_token


def whole(dataset: DataSet, length: int, **options: Any) -> Batch:
    source = open_source(dataset, "train", DataConfig(**options), length)
    return read_batch([source], [(0, index) for index in range(len(source))])


@pytest.mark.parametrize("options", [{}, {"packed_attention": True}, {"packing": "documents"}])
@pytest.mark.parametrize("shard_tokens", [5, 1000])
def test_columns_arrive_at_the_positions_of_their_tokens(
    make: Make, tmp_path: Path, options: dict[str, Any], shard_tokens: int
) -> None:
    rows = drawn(40)
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    dataset = make(tmp_path / "rows.jsonl", shard_tokens=shard_tokens, **ROWS)
    assert documents_of(dataset) == [row["tokens"] for row in rows]
    batch, expected = whole(dataset, 7, **options), expected_of(rows)
    assert set(batch.columns) == {"weights", "routing"}
    num_labels, num_inputs = 0, 0
    for place in np.ndindex(*batch.inputs_BS.shape):
        token, label = int(batch.inputs_BS[place]), int(batch.labels_BS[place])
        if label != IGNORE_INDEX:
            learned, factor, _ = expected[label]
            assert learned
            assert batch.columns["weights"][place] == factor
            num_labels += 1
        if batch.padding_BS is None or not batch.padding_BS[place]:
            assert batch.columns["routing"][place].tolist() == expected[token][2]
            num_inputs += 1
    of_learned = [learned for learned, _, _ in expected.values()]
    if options.get("packing") == "documents":
        firsts = [row["tokens"][0] for row in rows]
        assert num_labels == sum(of_learned) - sum(of_learned[token] for token in firsts)
        assert num_inputs == len(expected) - len(rows)
    else:
        assert (num_labels, num_inputs) == (sum(of_learned[1:]), len(expected) - 1)


def test_rows_with_a_mask_alone_have_no_column(make: Make, tmp_path: Path) -> None:
    row = {"tokens": [5, 6, 7, 8], "weights": [0, 0, 1, 1], "source": "somewhere"}
    (tmp_path / "rows.jsonl").write_text(lines(row, {"tokens": [1, 2]}))
    dataset = make(tmp_path / "rows.jsonl", **ROWS)
    batch = whole(dataset, 3, packing="documents")
    assert batch.columns == {}
    assert batch.labels_BS[0].tolist() == [IGNORE_INDEX, 7, 8]
    assert "columns" not in describe(dataset)


def test_parquet_is_read_and_the_description_names_the_columns(make: Make, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = drawn(20)
    names = ("tokens", "weights", "advantages", "routing")
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    datasets = [make(tmp_path / f"rows.{kind}", name=kind, **ROWS) for kind in ("parquet", "jsonl")]
    assert len({dataset.manifest.identity for dataset in datasets}) == 1
    assert "columns      routing, weights" in describe(datasets[0])


def test_held_out_rows_are_rows(make: Make, tmp_path: Path) -> None:
    rows = drawn(40)
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    dataset = make(tmp_path / "rows.jsonl", **{**ROWS, "holdout_every": 4})
    both = documents_of(dataset) + documents_of(dataset, "validation")
    assert sorted(both) == [row["tokens"] for row in rows]
    assert dataset.manifest.splits["validation"].documents == 10


def test_data_sets_without_columns_mix_with_those_that_have_some(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(lines(*drawn(9)))
    (tmp_path / "plain.jsonl").write_text(lines({"tokens": list(range(9))}))
    sources = [
        Source(
            name,
            open_source(
                make(tmp_path / f"{name}.jsonl", name=name, **ROWS), "train", DataConfig(), 8
            ).sequences,
            300,
        )
        for name in ("plain", "rows")
    ]
    batch = read_batch(sources, [(0, 0), (1, 0)])
    assert batch.columns["weights"][0].tolist() == [1] * 8
    assert batch.columns["routing"][0].eq(-1).all()
    assert batch.columns["routing"][1].ge(0).any()


def pairs_of(count: int, *, longest: int = 6) -> list[dict[str, Any]]:
    """Draw pairs of answers with log-probabilities."""
    draw, rows, token = random.Random(1), [], 0
    for _ in range(count):
        row = {}
        for name in ("chosen", "rejected"):
            length = draw.randint(2, longest)
            logprobs = [None, *(-draw.random() for _ in range(length - 1))]
            row[name] = {"tokens": list(range(token, token + length)), "logprobs": logprobs}
            token += length
        rows.append(row)
    return rows


@pytest.mark.parametrize("shard_tokens", [5, 1000])
def test_the_answers_of_a_pair_are_in_one_sequence(
    make: Make, tmp_path: Path, shard_tokens: int
) -> None:
    rows = pairs_of(20)
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    options = {**ROWS, "shard_tokens": shard_tokens, "holdout_every": 5}
    dataset = make(tmp_path / "rows.jsonl", **options)
    seen = 0
    for split in ("train", "validation"):
        source = open_source(dataset, split, DataConfig(packing="documents"), 14)
        batch = read_batch([source], [(0, index) for index in range(len(source))])
        assert max(len(pairs_S.unique()) for pairs_S in batch.columns["pairs"]) > 3
        of_token: dict[int, tuple[int, int, float]] = {}
        for place in np.ndindex(*batch.labels_BS.shape):
            pair, logprob = (batch.columns[name][place].item() for name in ("pairs", "logprobs"))
            label = int(batch.labels_BS[place])
            assert (label == IGNORE_INDEX) == (pair == 0)
            if pair:
                of_token[label] = place[0], pair, logprob
        for row in rows:
            labels = [row[name]["tokens"][1:] for name in ("chosen", "rejected")]
            if labels[0][0] not in of_token:
                continue  # it is in the other split
            seen += 1
            sequences = {of_token[label][0] for each in labels for label in each}
            numbers = [{of_token[label][1] for label in each} for each in labels]
            assert len(sequences) == 1
            assert numbers[0] == {-min(numbers[1])}
            assert min(numbers[0]) > 0
            for name, each in zip(("chosen", "rejected"), labels, strict=True):
                stored = [of_token[label][2] for label in each]
                assert stored == pytest.approx(row[name]["logprobs"][1:], rel=1e-6)
    assert seen == 20


def test_pairs_that_cannot_be_packed_are_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs_of(4)
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    dataset = make(tmp_path / "rows.jsonl", **ROWS)
    with pytest.raises(DataError, match=r"only data\.packing = 'documents' keeps"):
        open_source(dataset, "train", DataConfig(), 14)
    with pytest.raises(DataError, match=r"a pair has \d tokens: give train.sequence_length"):
        open_source(dataset, "train", DataConfig(packing="documents"), 3)
    (tmp_path / "rows.jsonl").write_text(lines(*rows, {"tokens": [1, 2, 3]}))
    with pytest.raises(DataError, match="only some rows are pairs"):
        make(tmp_path / "rows.jsonl", **ROWS, name="mixed")
    (tmp_path / "pairs.jsonl").write_text(lines(*rows))
    (tmp_path / "rows.jsonl").write_text(lines({"tokens": [1, 2, 3]}))
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 1)  # a unit for each file
    both = tmp_path / "pairs.jsonl", tmp_path / "rows.jsonl"
    mixed = make(*both, **ROWS, name="mixed of units")
    with pytest.raises(DataError, match="only some rows are pairs"):
        open_source(mixed, "train", DataConfig(packing="documents"), 14)


ANSWER = {"tokens": [1, 2], "logprobs": [None, -1.0]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": ANSWER}, "chosen and rejected are not two rows"),
        ({"chosen": ANSWER, "rejected": [1, 2]}, "chosen and rejected are not two rows"),
        ({"chosen": ANSWER, "rejected": {**ANSWER, "logprobs": None}}, "has no logprobs"),
        ({"chosen": ANSWER, "rejected": {**ANSWER, "logprobs": [-1]}}, "has no logprobs"),
        ({"chosen": ANSWER, "rejected": {**ANSWER, "logprobs": [-1, None]}}, "has no logprobs"),
        ({"chosen": {**ANSWER, "weights": 0.5}, "rejected": ANSWER}, "a pair has weights other"),
        ({"chosen": {**ANSWER, "weights": [1, 0]}, "rejected": ANSWER}, "no token that is learned"),
        ({"chosen": {**ANSWER, "tokens": [1]}, "rejected": ANSWER}, "no token that is learned"),
    ],
)
def test_what_is_no_pair_is_skipped_with_the_reason(fields: dict[str, Any], message: str) -> None:
    skip = read_rows(Record(3, fields))
    assert isinstance(skip, Skip)
    assert skip.line == 3
    assert message in skip.detail


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "tokens is not a list of integers"),
        ({"tokens": "abc"}, "tokens is not a list of integers"),
        ({"tokens": [1.5, 2]}, "tokens is not a list of integers"),
        ({"tokens": [True, False]}, "tokens is not a list of integers"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [3, -1]}, "tokens has -1"),
        ({"tokens": [1, 2], "weights": [1]}, "weights has 1 values for 2 tokens"),
        ({"tokens": [1, 2], "weights": [1, None]}, "weights has a value that is not finite"),
        ({"tokens": [1, 2], "weights": [1, "x"]}, "weights is neither"),
        ({"tokens": [1, 2], "weights": [[1], [2, 3]]}, "weights is neither"),
        ({"tokens": [1, 2], "advantages": float("inf")}, "advantages has a value that is not"),
        ({"tokens": [1, 2], "weights": 1e30, "advantages": 1e30}, "too large for fp32"),
        ({"tokens": [1, 2], "routing": [[0, 1], [1, 2]]}, "routing is not 3 levels of lists"),
        ({"tokens": [1, 2], "routing": [[[0, 1]], [[1]]]}, "routing is not 3 levels of lists"),
        ({"tokens": [1, 2, 3], "routing": [[[0, 1]]]}, "routing has 1 entries for 3 tokens"),
        ({"tokens": [1], "routing": [[[0, 40000]]]}, "not from -1 to 32,767"),
    ],
)
def test_what_is_no_row_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        row_of(fields)


def test_what_is_no_row_is_skipped_and_counted(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines({"tokens": [1, 2]}, {"tokens": []}, {"text": "abc"}))
    dataset = make(path, **ROWS)
    assert skips(dataset) == [
        (str(path), 2, "no row of tokens", "tokens is empty"),
        (str(path), 3, "no row of tokens", "tokens is not a list of integers"),
    ]


def test_rows_that_do_not_fit_are_refused(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines({"tokens": [1, 300]}))
    with pytest.raises(DataError, match="token 300 is outside the vocabulary of 300"):
        make(path, **ROWS)
    routing = [[[[0, 1]], [[1, 2]]], [[[0]], [[1]]]]
    path.write_text(lines(*({"tokens": [1, 2], "routing": each} for each in routing)))
    with pytest.raises(DataError, match=r"routing has shape \(1, 1\) per token in a document"):
        make(path, **ROWS, name="another")
    with pytest.raises(ConfigError, match="token_rows = true is not valid"):
        make(path, **ROWS, name="third", chat=True)
    for name, each in zip("ab", routing, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(lines({"tokens": [1, 2], "routing": each}))
    sources = [
        open_source(make(tmp_path / f"{name}.jsonl", name=name, **ROWS), "train", DataConfig(), 1)
        for name in "ab"
    ]
    with pytest.raises(DataError, match=r"routing has shape \(1, 1\) per token, and \(1, 2\) in"):
        read_batch(sources, [(0, 0)])


def test_a_damaged_column_is_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines(*drawn(9)))
    dataset = make(tmp_path / "rows.jsonl", **ROWS)
    file = dataset.folder / "train-00000-000.weights.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"weights.npy: token shard (is truncated|cannot be read)"):
        dataset.split("train")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "weights.npy: its checksum is" in dataset.check()[0]


def test_the_order_of_a_shard_is_that_of_numpy(make: Make, tmp_path: Path) -> None:
    rows = drawn(9)
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    folder = make(tmp_path / "rows.jsonl", **ROWS).folder
    routing = np.load(folder / "train-00000-000.routing.npy", mmap_mode="r")
    expected = [experts for _, _, experts in expected_of(rows).values()]
    assert routing.tolist() == expected
    assert json.loads((folder / "dataset.json").read_text())["splits"]["train"]["documents"] == 9
