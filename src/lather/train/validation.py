"""The validations of a run, on its held-out sequences, every time the same: of its weights, and of
their average if it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lather.checkpoint.folder import Progress
from lather.data.batches import HeldOut
from lather.engine.averaged_weights import AveragedWeights
from lather.engine.engine import Engine
from lather.train import metrics
from lather.train.notices import Notices


class Validation:
    """Validates a run on a rank. All ranks call it together."""

    def __init__(
        self,
        engine: Engine,
        average: AveragedWeights | None,
        held_out: Mapping[str, HeldOut],
        notices: Notices,
        note: Callable[[str], None],
    ) -> None:
        """`held_out`: by name, the run's own set first; `note` shows a line."""
        self._engine, self._average, self._held_out = engine, average, held_out
        self._notices, self._note = notices, note

    def run(self, progress: Progress) -> metrics.ValidationRow | None:
        """Validate and show the losses; return the row of metrics, None without held-out sets. The
        average of a run that has not begun is not validated: it is the weights."""
        losses = self._losses()
        if not losses:
            return None
        averaged: Mapping[str, float | None] = {}
        if self._average is not None and progress.step:
            with self._average.as_weights():
                averaged = self._losses()
        text = f"step {progress.step}: validation loss {_listed(losses)}"
        self._note(f"{text}; averaged weights {_listed(averaged)}" if averaged else text)
        sizes = {name: len(held_out.indices) for name, held_out in self._held_out.items()}
        self._notices.watch_validation(losses, sizes)
        return metrics.validation_row(losses, averaged, progress)

    def _losses(self) -> dict[str, float | None]:
        ranks = self._engine.mesh.data_rank, self._engine.mesh.data_size
        batches = {name: held_out.batch(*ranks) for name, held_out in self._held_out.items()}
        return {name: self._engine.validation_loss(batch) for name, batch in batches.items()}


def _listed(losses: Mapping[str, float | None]) -> str:
    """Return the loss of the first set and, if there are several, that of each."""
    texts = ["-" if loss is None else f"{loss:.4f}" for loss in losses.values()]
    by_set = ", ".join(f"{name} {text}" for name, text in zip(losses, texts, strict=True))
    return f"{texts[0]} ({by_set})" if len(losses) > 1 else texts[0]
