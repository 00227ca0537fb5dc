"""The lowest validation loss of a run: which checkpoint to keep for it, and the early end of a run
that finds no lower one. Its state is made of the run's rows of metrics, so that a resumed run ends
where an uninterrupted one does."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lather.checkpoint.folder import loss_on
from lather.config.config import Config
from lather.errors import ConfigError

Validations = list[tuple[int, float]]
"""Step and loss of each validation after step 0, in order; infinite if it was not finite."""


def validations(rows: Sequence[Mapping[str, Any]], name: str = "") -> Validations:
    """Return the validations on a held-out set, "" for the run's own, from rows of metrics."""
    return [
        (row["step"], loss_on(row, name))
        for row in rows
        if "validation_loss" in row and row["step"] > 0
    ]


def has_ended(found: Validations, patience: int) -> bool:
    """Return whether so many last validations (0: never) were no lower than the best before.
    Without a finite loss there is no best: a held-out set without labels ends no run."""
    best = min(range(len(found)), key=lambda number: found[number][1], default=0)
    return 0 < patience < len(found) - best and found[best][1] < math.inf


class BestValidation:
    """Follows the validations of a run, the same on all ranks."""

    def __init__(self, config: Config, sets: Sequence[str]) -> None:
        """`sets`: names of the held-out sets, the run's own first. Raises ConfigError if
        `train.patience_on` is none of them, or if `train.patience` has none to go by."""
        train = config.train
        self._patience, self._name = train.patience, train.patience_on
        if self._name and self._name not in sets:
            raise ConfigError(
                f"train.patience_on = {self._name!r} is not valid: it must be the name of a "
                f"held-out set of the run ({', '.join(sets) or 'it has none'})"
            )
        if self._patience and not sets:
            raise ConfigError(
                f"train.patience = {self._patience} needs a held-out set, and the run has none: "
                "give one in data.validation, data with a validation split, or train.patience 0"
            )
        self.keeps = config.checkpoint.keep_best or train.patience > 0
        """Whether the checkpoint with the lowest loss is kept."""
        self._found: Validations = []
        self.loss = math.inf
        """The lowest loss at a step with a checkpoint."""
        self.step: int | None = None
        """The step with that checkpoint."""

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> Validations:
        """Return the state from rows of metrics."""
        return validations(rows, self._name)

    def restore(self, found: Validations, checkpoints: Collection[int]) -> None:
        """Continue after these validations, with checkpoints of these steps."""
        self._found = found
        kept = [(loss, step) for step, loss in found if step in checkpoints and loss < math.inf]
        self.loss, self.step = min(kept, default=(math.inf, None))

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a validation; return whether a checkpoint is to be saved and kept for it."""
        for step, loss in validations([row], self._name):
            self._found.append((step, loss))
            if self.keeps and loss < self.loss:
                self.loss, self.step = loss, step
                return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether the run ends because of `train.patience`."""
        return has_ended(self._found, self._patience)

    def describe(self, run_dir: str) -> str:
        """Say why the run ends, and which checkpoint is the best."""
        best = "" if self.step is None else f"the best checkpoint is {run_dir}@{self.step}"
        best = best and f"{best}, with {self.loss:.4f}; "
        return (
            f"{self._patience} validations in a row were no lower than before, so the run ends "
            f"(train.patience): {best}a larger --train.patience continues it"
        )
