"""The results of a sweep, read from the folders of its runs: a row for each combination of values,
with the mean of its validation losses over seeds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.config import Config
from lather.config.run_folder import CONFIGURATION
from lather.config.toml_file import load_run
from lather.files import read_rows
from lather.sweep.grid import GridRun, Values
from lather.sweep.intervals import Mean
from lather.train.best import has_ended, validations

OTHER_LOSSES = ("data.", "train.sequence_length", "train.validation_sequences", "model.vocab_size")
"""Fields, or beginnings of their names, that change what a validation loss is measured on."""
OTHER_TOKENS = (
    *("train.steps", "train.epochs", "train.batch_size"),
    *("train.first_batch_size", "train.batch_growth_steps"),
)
"""Fields that change the number of tokens that a run trains on."""
AVERAGES = "train.average_timescale"
Weights = Literal["raw", "average"]
LOSSES: Mapping[Weights, str] = {
    "raw": "validation loss",
    "average": "validation loss of averages",
}
"""The loss by which runs are judged, by the weights whose loss it is."""
TAIL_BYTES = 4096


@dataclass(frozen=True)
class RunResult:
    """The result of a run, once it is final."""

    loss: float
    """The validation loss at the end; infinite if the run diverged."""
    why: str = ""
    """The reason why it diverged."""


def result_of(run_dir: Path, config: Config, weights: Weights = "raw") -> RunResult | None:
    """Return the result of the run in this folder, the loss of its weights or of their averages;
    None if it has not come to its end."""
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row and row["tokens"]]  # others count for nothing
    most = config.train.max_skipped_steps
    if len(steps) >= most and all(row.get("skipped") for row in steps[-most:]):
        return RunResult(math.inf, f"{most} steps up to step {steps[-1]['step']} were skipped")
    saved = [step_of(checkpoint) for checkpoint in list_checkpoints(run_dir / "checkpoints")]
    last = [row for row in rows if "validation_loss" in row][-1:]
    found = validations(rows, config.train.patience_on)
    end = found[-1][0] if has_ended(found, config.train.patience) else _num_steps(run_dir, config)
    if end not in saved or not last or last[0]["step"] != end:
        return None
    loss = last[0].get("validation_loss" if weights == "raw" else "average_validation_loss")
    if loss is None:
        return RunResult(math.inf, "its last validation loss is not finite")
    return RunResult(float(loss))


def _num_steps(run_dir: Path, config: Config) -> int:
    """Return the steps of a run, which those with `train.epochs` have computed."""
    is_written = config.train.epochs and (run_dir / CONFIGURATION).exists()
    return load_run(run_dir).train.steps if is_written else config.train.steps


def last_step(run_dir: Path) -> int:
    """Return the last step in the metrics of a run; 0 if there is none."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, LookupError):  # no row yet, or a row that is being written
        return 0


@dataclass(frozen=True)
class SweepRow:
    """The runs with the same values."""

    values: Values
    runs: Sequence[GridRun]
    results: Sequence[RunResult]
    """Results of the runs that have come to their end."""

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.runs)

    @property
    def mean(self) -> Mean | None:
        """The mean of the validation losses so far; None if there is none."""
        return Mean.of([result.loss for result in self.results]) if self.results else None

    @property
    def place(self) -> tuple[float, bool]:
        """The place among the rows: the lowest mean first."""
        return (math.inf if self.mean is None else self.mean.value), self.mean is None


def rows_of(runs: Sequence[GridRun], results: Mapping[str, RunResult]) -> list[SweepRow]:
    """Return the rows, the best first. `results`: by the key of the run."""
    groups: dict[str, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(str(run.values), []).append(run)
    rows = [
        SweepRow(each[0].values, each, [results[run.key] for run in each if run.key in results])
        for each in groups.values()
    ]
    return sorted(rows, key=lambda row: row.place)


def best_of(rows: Sequence[SweepRow]) -> SweepRow | None:
    """Return the best of the rows whose runs have all come to their end without diverging."""
    complete = [row for row in rows if row.is_complete and math.isfinite(row.place[0])]
    return min(complete, key=lambda row: row.place, default=None)


def notes_on(rows: Sequence[SweepRow], weights: Weights = "raw") -> Iterator[str]:
    """Yield a sentence on the place of the best row among the values of each number that is varied,
    and one if losses of rows cannot be compared, or are not those of the averages that are
    varied."""
    names = [name for name in rows[0].values if len({row.values[name] for row in rows}) > 1]
    if AVERAGES in names and weights == "raw":
        also = " and leave 0 out" if any(number_of(row, AVERAGES) == 0 for row in rows) else ""
        yield (
            f"{AVERAGES} does not change these losses, which are of the raw weights: add --weights "
            f"average{also}"
        )
        names.remove(AVERAGES)
    best = best_of(rows)
    for name in names if best else ():
        assert best is not None
        others = [row for row in rows if row.results and _differ_in(row, best) <= {name}]
        numbers = sorted({number for row in others if (number := number_of(row, name)) is not None})
        equal = [row.values[name] for row in others if row.place == best.place]
        if len(equal) > 1:
            yield f"The lowest loss is the same at {name} {' and '.join(equal)}."
        elif len(numbers) == len(others) > 1:
            place = numbers.index(number_of(best, name) or 0.0)
            if 0 < place < len(numbers) - 1:
                yield f"The best {name}, {best.values[name]}, lies between others."
            else:
                end = "lower" if place == 0 else "higher"
                yield (
                    f"The best {name}, {best.values[name]}, is at the edge of its values: extend "
                    f"them with {end} ones."
                )
    if losses := [name for name in names if name.startswith(OTHER_LOSSES)]:
        yield (
            f"Losses at different {' and '.join(losses)} are of different tokens: do not compare "
            "them."
        )
    if tokens := [name for name in names if name in OTHER_TOKENS]:
        yield f"Rows at different {' and '.join(tokens)} have trained on more or fewer tokens."


def number_of(row: SweepRow, name: str) -> float | None:
    """Return the value of a field as a number; None if it is none."""
    try:
        return float(row.values[name])
    except ValueError:
        return None


def _differ_in(row: SweepRow, other: SweepRow) -> set[str]:
    return {name for name in row.values if row.values[name] != other.values[name]}
