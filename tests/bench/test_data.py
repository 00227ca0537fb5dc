"""The benchmark of data sets, at a size that takes seconds: its rows have what the table shows."""

import json
from pathlib import Path

from tiny_run import run


def test_small_cases_give_rows(tmp_path: Path) -> None:
    status, out, err = run("bench", "data", "--out", tmp_path, "--megabytes", 1, "--rounds", 1, "--documents", 11_000, "--batches", 50)
    assert status == 0, err
    rows = {row["case"]: row for row in map(json.loads, (tmp_path / "data-cpu.jsonl").read_text().splitlines())}
    assert list(rows) == ["throughput", "memory of making", "memory of reading", "opening", "loader"]
    assert rows["throughput"]["of_tokenizers"] > 0.1
    assert rows["memory of making"]["mib"] > 20
    assert "JSONL to shards" in out
