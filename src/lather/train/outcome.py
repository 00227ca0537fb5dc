"""The result of a run, for the command and other callers, and what a finished run makes at its
end: a sample and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lather.checkpoint.folder import Progress
from lather.config.config import Config
from lather.data.batches import HeldOut
from lather.files import optional_file, read_rows, write_aside
from lather.train.metrics import training_rows
from lather.train.trained_model import SAMPLE, TrainedModel


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run."""

    finished: bool
    """False if a signal or `train.minutes` ended the run early; the same command resumes it."""
    step: int
    seconds: float
    validation_losses: list[float | None]
    """All of the run, first to last; None for a loss that was not finite. Empty on ranks other than
    0."""
    sample: str
    checkpoint: Path
    average_loss: float | None = None
    """The last validation loss of the averaged weights, if there are any."""
    out_of_time: bool = False
    """Whether `train.minutes` ended the run. False on ranks other than 0."""


def outcome_of(rows: Sequence[dict[str, Any]], progress: Progress, checkpoint: Path) -> RunOutcome:
    """Return the result of a run that has not finished. `rows`: those of its metrics, none on ranks
    other than 0."""
    validations = [row for row in rows if "validation_loss" in row]
    losses = [row["validation_loss"] for row in validations]
    average = validations[-1].get("average_validation_loss") if validations else None
    return RunOutcome(False, progress.step, progress.seconds, losses, "", checkpoint, average)


def finish(
    outcome: RunOutcome,
    config: Config,
    held_out: HeldOut | None,
    device: torch.device,
    note: Callable[[str], None],
) -> RunOutcome:
    """Draw a finished run and write its sample, as `[log]` says; return the outcome with the
    sample. Rank 0 alone calls it: no rank of a mesh has the whole model, so it loads the
    checkpoint."""
    path = Path(config.run_dir)
    sample = ""
    # data sets of token files need not have a tokenizer
    if config.log.sample_tokens and (path / "tokenizer.json").exists():
        sample = TrainedModel(path, outcome.checkpoint, config).sample(held_out, device)
    if sample:
        with optional_file(path / SAMPLE, note):
            write_aside(path / SAMPLE, sample)
    if config.log.picture and any(training_rows(read_rows(path / "metrics.jsonl"))):
        from lather.train.report import draw_run  # matplotlib takes a second to import

        draw_run(path, note)
    return replace(outcome, sample=sample)
