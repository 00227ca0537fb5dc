"""Finds a checkpoint by name: RUN, its newest one; RUN@STEP; RUN@best, the kept one with the lowest validation loss."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from lather.checkpoint.folder import list_checkpoints, step_of
from lather.errors import UserError
from lather.files import read_rows

BEST = "best"


def find_checkpoint(run_at_step: str, step: int = -1) -> tuple[Path, Path]:
    """Return the run and the checkpoint that RUN, RUN@STEP or RUN@best names. The run's own name may contain an @.

    `step`: the value of an option `--step`, negative if it was not given. Raises UserError if there is no such run or checkpoint, listing
    the existing ones, or if both name a step.
    """
    (run, wanted), place = _split(run_at_step), run_at_step
    if step >= 0:
        if wanted is not None:
            raise UserError(f"{run_at_step} and --step {step} both say which checkpoint: give one of them")
        wanted, place = str(step), f"--step {step}"
    folder = run / "checkpoints"
    found = list_checkpoints(folder) or list_checkpoints(folder)  # a training run may have replaced its only one during the first call
    checkpoints = {step_of(path): path for path in found}
    if not checkpoints:
        raise UserError(f"{run / 'checkpoints'}: no checkpoint yet: let the run train first")
    if wanted is None:
        return run, checkpoints[max(checkpoints)]
    there = ", ".join(map(str, checkpoints))
    if wanted == BEST:
        best = best_checkpoint(checkpoints, read_rows(run / "metrics.jsonl"))
        if best is None:
            raise UserError(f"{run}@{BEST}: no validation loss is known for the kept checkpoints: use one of {there}")
        return run, checkpoints[best[1]]
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) in checkpoints):
        raise UserError(f"{place}: no such checkpoint in {run / 'checkpoints'}: use one of {there}, or {BEST}")
    return run, checkpoints[int(wanted)]


def _split(run_at_step: str) -> tuple[Path, str | None]:
    """Return the run, and the part after the @ if there is one."""
    whole = Path(run_at_step)
    if (whole / "config.toml").exists():
        return whole, None
    name, at, step = run_at_step.rpartition("@")
    run = Path(name) if at and name else whole
    if not (run / "config.toml").exists():
        raise UserError(f"{run}: not a run (it has no config.toml): give the run_dir of a training run")
    return run, step


def best_checkpoint(steps: Collection[int], rows: list[dict[str, Any]]) -> tuple[float, int] | None:
    """Return the lowest validation loss at a step with a checkpoint, and that step; None if no such loss is known."""
    losses = [(row["validation_loss"], row["step"]) for row in rows if row.get("validation_loss") is not None and row["step"] in steps]
    return min(losses, default=None)
