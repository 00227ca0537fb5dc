"""Makes a run of a study: `lather train` in this process, and a row from the files that it
leaves.

A run that was killed goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.convergence.fp8_controls import (
    AGREEMENT,
    BF16_LOSS,
    expert_scales,
    logged_agreement,
)
from benchmarks.convergence.study import Row, Trial
from lather.files import read_rows
from lather.train.diverged import DivergedError
from lather.train.loop import train
from lather.train.metrics import StepRow, training_rows
from lather.train.requests import RunRequests

BINS = 100
"""Number of points of a run's curve of training losses; each is the mean over equally many
steps."""


class Silent:
    """A display that shows nothing."""

    def note(self, text: str) -> None:
        pass

    def step(self, row: StepRow, num_steps: int) -> None:
        pass


def perform(trial: Trial, folder: Path, stop: Callable[[], bool]) -> Row | None:
    """Train to the end in the run's folder and return its row, or None if it was stopped
    before. Raises UserError."""
    config = trial.config(folder)
    log = logged_agreement() if config.train.fp8 == "block" else nullcontext()
    try:
        with expert_scales(trial.scales), log:
            outcome = train(config, Silent(), RunRequests(stop))
    except DivergedError:
        return row_of(trial, folder, diverged=True)
    return row_of(trial, folder, diverged=False) if outcome.finished else None


def row_of(trial: Trial, folder: Path, *, diverged: bool) -> Row:
    """Make the row of a finished run."""
    rows = read_rows(folder / "metrics.jsonl")
    steps: list[dict[str, Any]] = list(training_rows(rows))
    validation = _curve(rows, "validation_loss")
    average = _curve(rows, "average_validation_loss")
    in_bf16 = _curve(rows, BF16_LOSS)
    agreement = [
        [row["step"], [round(share, 5) for share in row[AGREEMENT]]]
        for row in rows
        if AGREEMENT in row
    ]
    config = trial.config(folder)
    return {
        "benchmark": "convergence",
        "key": trial.key,
        "setting": trial.setting,
        "contestant": trial.contestant,
        "seed": trial.seed,
        "rates": list(trial.rates),
        "optim": trial.mapping["optim"],
        "steps": config.train.steps,
        "tokens_per_step": config.train.batch_size * config.train.sequence_length,
        "final": None if diverged else validation[-1][1],
        "validation": validation,
        **({"average_validation": average} if average else {}),
        **({"bf16_validation": in_bf16, "routing_agreement": agreement} if agreement else {}),
        "training": _binned(steps),
        "seconds": sum(row["step_seconds"] for row in steps),
        "optimizer_seconds": sum(row["optimizer_seconds"] for row in steps),
    }


def _curve(rows: Sequence[dict[str, Any]], name: str) -> list[list[float]]:
    """Return the steps at which a loss was measured, each with the loss."""
    return [[row["step"], round(row[name], 5)] for row in rows if name in row]


def _binned(rows: list[dict[str, Any]]) -> list[list[float]]:
    """Yield the last step and the mean loss of consecutive parts of the run."""
    size = max(1, -(-len(rows) // BINS))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [
        [part[-1]["step"], round(sum(row["loss"] for row in part) / len(part), 4)] for part in parts
    ]


def forget(folder: Path) -> None:
    """Delete the files of a finished run, once its row is safe."""
    shutil.rmtree(folder, ignore_errors=True)
