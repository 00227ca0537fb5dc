"""`lather bench memory` on small sizes: bytes are those of the formulas, a wrong contestant is not
reported, rows appear whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks.check import CheckError
from benchmarks.memory import (
    LayerSizes,
    MemoryBenchmark,
    check_layers,
    loss_extra_bytes,
    make_layers,
    measure_kept,
    plain_loss,
)
from benchmarks.memory_report import summary
from lather.cli import main

D, E, K, F = 32, 5, 3, 24
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LayerSizes(D, E, K, F)
    monkeypatch.setattr(memory, "HIDDEN", D)
    monkeypatch.setattr(memory, "PUBLISHED", sizes)
    monkeypatch.setattr(memory, "TIMED", {"small": (sizes, 16)})
    monkeypatch.setattr(memory, "LOSS_TOKENS", 2000)
    monkeypatch.setattr(memory, "VOCABULARY", 3000)


def test_kept_bytes_are_those_of_the_formulas() -> None:
    """Besides bf16 tensors, scores and indices are kept; `reference` keeps bf16 weights of its own,
    one per row."""
    elements = {
        "reference": D + 2 * K * D + 4 * K * F + K,
        "early_free": D + 2 * K * D + 3 * K * F,
        "saved": D + 2 * K * F,
        "recompute": D,
    }
    for row in measure_kept(CPU):
        name = row["config"]["contestant"]
        assert 0 < row["bytes_per_token"] - 2 * elements[name] < 40 * (E + 3 * K), name
        if name in ("saved", "recompute"):
            assert row["bound_elements_per_token"] == elements[name]


def test_a_contestant_that_is_wrong_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = make_layers(LayerSizes(D, E, K, F), torch.float32, CPU)
    assert max(check_layers(layers).values()) < 1e-5
    right = memory.EarlyFree.forward
    monkeypatch.setattr(
        memory.EarlyFree, "forward", lambda self, *arguments: 1.01 * right(self, *arguments)
    )
    with pytest.raises(CheckError, match="early_free: differs from plain autograd by 1"):
        check_layers(layers)
    assert (
        main(["bench", "memory", "--parts", "time", "--rounds", "5", "--out", str(tmp_path)]) == 1
    )
    assert "check failed, nothing is reported" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_plain_loss_holds_at_least_the_logits_and_ours_does_not() -> None:
    logits = 2000 * 3000 * 4
    assert loss_extra_bytes(plain_loss, torch.float32) >= 2 * logits
    assert loss_extra_bytes(memory.linear_cross_entropy, torch.float32) < logits / 4


def test_the_command_leaves_whole_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--rounds", "5", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "memory-cpu.jsonl").read_text().splitlines()]
    assert [row["benchmark"] for row in rows] == ["kept"] * 4 + ["loss"] * 4 + ["time"] * 4
    assert all(row["check"] and "commit" in row and "hardware" in row for row in rows)
    assert all(len(row["round_ms"]) == 5 for row in rows if row["benchmark"] == "time")
    out = " ".join(capsys.readouterr().out.split())
    for line in summary(rows):
        assert " ".join(line.split()) in out
    assert [path.name for path in tmp_path.iterdir()] == ["memory-cpu.jsonl"]


def test_fewer_rounds_than_five_are_refused_in_code_too() -> None:
    with pytest.raises(ValueError, match="--rounds"):
        MemoryBenchmark(rounds=1)
