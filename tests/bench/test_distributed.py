"""The counts of `lather bench distributed` are those that are known by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.distributed import DistributedBenchmark, count, owners_row, run
from lather.errors import ConfigError
from lather.parallel.launch.start import launch


def test_counts_of_two_ranks(tmp_path: Path) -> None:
    """There are two equal matrices on two ranks: each rank sends half of the other's gradient and
    half of its own update."""
    assert launch(count, (((16, 16), (16, 16)), str(tmp_path)), 2) == 0
    for rank in json.loads((tmp_path / "ranks.json").read_text()):
        flags = 8 * (1 + 2 + 2)  # flags for raising, presence and norms are all-reduced in fp64
        assert rank["wrong"] == 0
        assert rank["bytes_sent"] == 4 * (128 + 128) + flags
        assert rank["state_bytes"] == 4 * (2 * 256 + 2 * 256 + 2 * 136)  # moments, bases, factors
        assert rank["flops"] * 2 == rank["flops_of_one_process"] > 0
        assert rank["bytes_gathering"] == 2 * 3 * 4 * 128


def test_the_plan_of_one_rank_and_of_eight() -> None:
    alone = owners_row("deepseek-v2-lite", 1)
    assert alone["max_over_mean"] == 1.0
    assert alone["stay"] == alone["matrices"]
    eight = owners_row("deepseek-v2-lite", 8)
    assert eight["matrices"] == alone["matrices"]
    assert 1.0 <= eight["max_over_mean"] < 1.05


def test_no_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="--parts"):
        DistributedBenchmark(parts=())


def test_rows_and_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.distributed.MESHES", (8,))
    assert run(DistributedBenchmark(parts=("plan",), out=tmp_path)) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "distributed-optimizer.jsonl").read_text().splitlines()
    ]
    assert [row["config"]["model"] for row in rows] == ["qwen3-30b-a3b", "deepseek-v2-lite"]
    shown = " ".join(capsys.readouterr().out.split())
    assert all(row["summary"] in shown for row in rows)
