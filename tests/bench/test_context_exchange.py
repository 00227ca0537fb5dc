"""The counts of the exchange of context ranks: one case by hand, what each way to hide the exchange
cannot save, and the stored rows."""

from __future__ import annotations

import json

import pytest

from benchmarks.context_exchange import LATENCY, OUT, counts_of, markdown_table, row, rows

QWEN3 = "qwen3-30b-a3b"


def test_a_case_by_hand() -> None:
    """Qwen3-30B-A3B: 4 key-value heads of 128, so 1,024 numbers of a token; 32 query heads."""
    case = row(QWEN3, 131_072, 8, "400 Gb/s")
    assert case["layer"]["received"] == 7 * 16_384 * 1024 * 2
    assert case["layer"]["held"] == 131_072 * 1024 * 2
    gather = 234_881_024 / 50e9 + LATENCY
    assert case["layer"]["gather_s"] == pytest.approx(gather)
    attention = 131_072**2 / 2 / 8 * 32 * (128 + 128) * 2 / 400e12
    assert case["layer"]["attention_s"] == pytest.approx(attention)
    weights = 48 * (2048 * 128 * (32 + 4 + 4 + 32) + 8 * 3 * 2048 * 768 + 128 * 2048)
    others = 6 * (weights + 151_936 * 2048) * 16_384 / 400e12
    assert case["compute_s"] == pytest.approx(48 * 3.5 * attention + others, rel=1e-4)
    assert case["exchange_s"] == pytest.approx(48 * 3 * gather)
    assert case["exchange_share"] * (case["compute_s"] + case["exchange_s"]) == pytest.approx(
        case["exchange_s"]
    )


def test_latent_attention_sends_latents_and_expands_them_everywhere() -> None:
    counts = counts_of("deepseek-v2-lite")
    assert (counts.exchanged, counts.has_groups) == (512 + 64, False)
    assert counts.whole_products == 8 * 27 * 512 * 16 * (128 + 128)


def test_nothing_saves_more_than_the_exchange_and_windows_need_no_ring() -> None:
    for case in rows():
        saved = max(case["ring_saves"], case["groups_save"]) + case["neighbors_save"]
        assert 0 <= saved < case["exchange_share"]
        assert (case["neighbors_save"] > 0) == (case["model"] == "gpt-oss-20b")


def test_a_ring_saves_nothing_where_the_link_is_the_limit() -> None:
    """It passes gradients in fp32, so its backward pass sends more than a gather's."""
    case = row(QWEN3, 32_768, 16, "100 Gb/s")
    assert case["layer"]["gather_s"] > 2.5 * case["layer"]["attention_s"]
    assert case["ring_saves"] == 0
    assert case["left_beside_a_partner"] > 0.5


def test_the_stored_rows_are_those_of_today() -> None:
    stored = [json.loads(line) for line in OUT.read_text().splitlines()]
    assert stored == [json.loads(json.dumps(case)) for case in rows()]


def test_the_table_has_a_line_for_each_model_and_length() -> None:
    table = markdown_table([row(QWEN3, 65_536, 8, link) for link in ("NVLink", "400 Gb/s")], 8)
    assert table.splitlines()[0] == "| model | tokens | MiB | NVLink | 400 Gb/s |"
    assert table.splitlines()[2] == (
        "| qwen3-30b-a3b | 65,536 | 128 | 2.6 / 0.0 / 1.4 | 13.3 / 8.1 / 9.5 |"
    )
