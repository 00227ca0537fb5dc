"""The benchmark of data sets, at a size that takes seconds: its rows have what the table shows."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import data
from benchmarks.data import DataBenchmark
from forked import ForkedPython


def test_small_cases_give_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forked(command: list[str], **options: int) -> ForkedPython:
        return ForkedPython(command[1:], **options)

    monkeypatch.setattr(
        data, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL)
    )
    assert (
        data.run(DataBenchmark(out=tmp_path, megabytes=1, rounds=1, documents=11_000, batches=50))
        == 0
    )
    rows = {
        row["case"]: row
        for row in map(json.loads, (tmp_path / "data-cpu.jsonl").read_text().splitlines())
    }
    assert list(rows) == [
        "throughput",
        "memory of making",
        "memory of reading",
        "opening",
        "loader",
    ]
    assert rows["throughput"]["of_tokenizers"] > 0.1
    assert rows["memory of making"]["mib"] > 20
    assert "JSONL to shards" in capsys.readouterr().out
