"""The folder of a run's checkpoints: their names (`step-00000100`), which are kept, and removal of incomplete ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir())


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, from its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


def aside_path(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is renamed."""
    return checkpoint.with_name(f".tmp-{checkpoint.name}")


def clear_leftovers(folder: Path) -> None:
    """Delete folders that killed processes have left partly written or partly deleted."""
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)


@dataclass(frozen=True)
class Retention:
    """The checkpoints that are kept when a new one is complete."""

    last: int
    """Number of newest checkpoints to keep, at least 1."""
    every: int = 0
    """Keep checkpoints whose step is a multiple of this; 0: none."""
    best: int | None = None
    """Keep the checkpoint of this step."""

    def delete_others(self, folder: Path) -> None:
        """Delete the checkpoints that are not kept. Each is renamed first, so that a kill leaves no incomplete checkpoint under its
        name."""
        for path in list_checkpoints(folder)[: -self.last]:
            step = step_of(path)
            if step != self.best and (not self.every or step % self.every):
                shutil.rmtree(path.rename(folder / f".tmp-old-{path.name}"))
