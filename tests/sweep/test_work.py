"""The table of a sweep, and the cores and GPUs that it gives to its runs."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from lather.config.config import Config
from lather.sweep import work
from lather.sweep.grid import GridRun
from lather.sweep.record import SweepFolder
from lather.sweep.results import RunResult
from lather.sweep.work import SweepWork, environment

NAMES = (*("optim.lr", "optim.rest.lr", "optim.weight_decay", "train.batch_size"), "optim.name")


def test_the_table_fits_80_columns_and_keeps_every_value(tmp_path: Path) -> None:
    """Six columns of names and numbers do not fit beside each other with their whole headers."""
    values = [
        ("0.0002", "0.0316228", "0.01", "128", "soap_muon"),
        ("0.0004", "0.0316228", "0.02", "256", "stacked_soap"),
        ("0.0008", "0.0316228", "0.03", "512", "embedding_soap"),
    ]
    runs = [
        GridRun(dict(zip(NAMES, each, strict=True)), Config(seed=seed))
        for each in values
        for seed in (0, 1)
    ]
    console = Console(width=80, file=io.StringIO())
    losses = [3.0, 3.1, 2.0, math.inf]
    results = {run.key: RunResult(loss) for run, loss in zip(runs, losses, strict=False)}
    shown = SweepWork(SweepFolder(tmp_path), runs, [], 1, 1, console, results)
    shown.failures[runs[4].key] = "failed: no memory"
    console.print(shown.table())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(cell_len, lines)) <= 80
    words = " ".join(lines).split()
    assert {value for each in values for value in each} <= {*words}
    assert {"3.0500", "0.6353", "diverged", "failed", "2/2", "0/2"} <= {*words}


def test_jobs_divide_the_cores_and_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "num_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(0, 1, 1, "cpu") == {"OMP_NUM_THREADS": "16"}
    assert environment(0, 20, 1, "cpu") == {"OMP_NUM_THREADS": "1"}
    each = [environment(place, 4, 1, "auto") for place in range(4)]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in each] == ["0", "1", "2", "0"]
    assert {variables["OMP_NUM_THREADS"] for variables in each} == {"4"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment(1, 2, 2, "cuda") == {"CUDA_VISIBLE_DEVICES": "7,5"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert environment(1, 2, 2, "auto") == {}
