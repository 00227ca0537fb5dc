"""Care for steps that would harm a run: those that `train.skip_steps` leaves out, and those that
are a spike or not finite, whose documents are named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal

from lather.checkpoint.folder import Progress
from lather.config.config import Config
from lather.config.step_ranges import step_ranges
from lather.data.batches import Batches, read_batch
from lather.data.documents import load_tokenizer
from lather.engine.step_reading import NOT_FINITE, StepResult
from lather.errors import DataError
from lather.train.metrics import SuspectRow, SuspectSequence
from lather.train.roll_back import FILE as ROLLED_BACK
from lather.train.run_record import RunRecord
from lather.train.spikes import SpikeWatch

FIRST_TOKENS = 24
"""Tokens of a sequence whose text a row shows."""
MOST_NAMED = 8
"""Documents that a note names."""


class Care:
    """Judges the steps of a run; all ranks judge alike, and rank 0 records."""

    def __init__(
        self, config: Config, batches: Batches, record: RunRecord, note: Callable[[str], None]
    ) -> None:
        """Continue with the last steps of the run, which `record` has."""
        self._batches, self._record, self._note = batches, record, note
        self._left_out = step_ranges(config.train.skip_steps)
        self._tokenizer = Path(config.run_dir) / "tokenizer.json"
        self._action = config.train.spikes
        self.must_roll_back = False
        """Whether the last step was a spike after which the run goes back to a checkpoint."""
        self._watch: SpikeWatch | None = None
        self._spike, self._finds_nan = "", config.debug.nan
        if self._action != "off":
            self._watch = SpikeWatch(config.train.spike_deviations, config.train.spike_window)
            self._watch.restore(record.of_rows(self._watch.values_of))

    def leaves_out(self, step: int) -> bool:
        """Return whether the batch of a step is left out; say so at the first of several."""
        is_left_out = self._is_left_out(step)
        if is_left_out and not self._is_left_out(step - 1):
            last = step
            for steps in sorted(self._left_out, key=lambda steps: steps.start):
                if steps.start <= last + 1:
                    last = max(last, steps[-1])
            which = f"steps {step} to {last} are" if last > step else f"step {step} is"
            self._note(f"{which} left out (train.skip_steps)")
        return is_left_out

    def _is_left_out(self, step: int) -> bool:
        return any(step in steps for steps in self._left_out)

    def is_spike(self, result: StepResult) -> bool:
        """Judge a step with a finite loss and norm; return whether it is to change nothing."""
        self._spike = "" if self._watch is None else self._watch.judge(result)
        self.must_roll_back = bool(self._spike) and self._action == "roll_back"
        return bool(self._spike) and self._action in ("skip", "roll_back")

    def report(
        self, result: StepResult, progress: Progress, find_origin: Callable[[], list[str]]
    ) -> None:
        """Show and record a completed step that was a spike or not finite, with its documents;
        `find_origin` returns where values that are not finite began."""
        origin: list[str] = []
        if result.skip_reason == NOT_FINITE and self._finds_nan:
            origin = find_origin()
        why, self._spike = self._spike, ""
        if result.skip_reason == NOT_FINITE:
            why = "its loss or gradient is not finite"
        if not why or not self._record.writes:
            return
        action: Literal["skipped", "taken"] = "skipped" if result.skipped else "taken"
        sequences: list[SuspectSequence] = []
        with contextlib.suppress(DataError, OSError):
            sequences += self._sequences(progress.step)
        file = ROLLED_BACK if self.must_roll_back else "metrics.jsonl"
        where = f" ({file} has their beginnings)"
        read = f"it read {named(sequences)}{where}"
        self._note(f"step {progress.step} was {action}: {why}; {read}")
        row: SuspectRow = {
            "step": progress.step,
            "seconds": progress.seconds,
            "suspect": why,
            "action": action,
            "sequences": sequences,
        }
        if origin:
            row["origin"] = origin
        for text in origin[:MOST_NAMED]:
            self._note(text)
        self._record.write(row)

    def _sequences(self, step: int) -> Iterator[SuspectSequence]:
        tokenizer = load_tokenizer(self._tokenizer, "") if self._tokenizer.exists() else None
        for number, index in self._batches.samples(step):
            source = self._batches.sources[number]
            row: SuspectSequence = {
                "data": source.name,
                "sequence": index,
                "documents": source.sequences.documents(index),
            }
            if tokenizer is not None:
                tokens_S = read_batch([source], [(0, index)]).inputs_BS[0]
                row["text"] = tokenizer.decode(tokens_S[:FIRST_TOKENS].tolist())
            yield row


def named(sequences: list[SuspectSequence]) -> str:
    """Name documents in a line: the first ones, by data set."""
    documents = sorted(
        {(each["data"], number) for each in sequences for number in each["documents"]}
    )
    parts = []
    for data, group in groupby(documents[:MOST_NAMED], key=lambda pair: pair[0]):
        numbers = [str(number) for _, number in group]
        parts.append(f"document{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {data}")
    more = len(documents) - MOST_NAMED
    if more > 0:
        parts.append(f"{more} more")
    return " and ".join(parts) or "documents"
