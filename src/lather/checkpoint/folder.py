"""The folder of a run's checkpoints: `step-00000100` and so on, which of them stay, and what is left of unfinished ones."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir())


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


def aside_path(checkpoint: Path) -> Path:
    """The folder in which a checkpoint is written before it gets its name."""
    return checkpoint.with_name(f".tmp-{checkpoint.name}")


def clear_leftovers(folder: Path) -> None:
    """Delete what killed processes have left half written or half deleted."""
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)


@dataclass(frozen=True)
class Retention:
    """The checkpoints that are kept when a new one is in place."""

    last: int
    """How many of the newest are kept, at least 1."""
    every: int = 0
    """Checkpoints of a multiple of so many steps are kept; 0: none."""
    best: int | None = None
    """The step of another one that is kept."""

    def delete_others(self, folder: Path) -> None:
        """Delete the folder's checkpoints that are not kept; a process killed meanwhile leaves none of them half there under its name."""
        for path in list_checkpoints(folder)[: -self.last]:
            step = step_of(path)
            if step != self.best and (not self.every or step % self.every):
                shutil.rmtree(path.rename(folder / f".tmp-old-{path.name}"))
