"""The result of a run, for the command and other callers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
