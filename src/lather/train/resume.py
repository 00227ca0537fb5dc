"""The start of a run, new, resumed or forked, and the check of which configuration fields may have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.changes import Change, History, class_of, differences, values_of
from lather.config.config import Config
from lather.config.old_runs import OldOptimConfig, going_on
from lather.config.toml_file import config_of_run, load_run
from lather.errors import ConfigError, RunError


@dataclass(frozen=True)
class Start:
    """The step after which a run starts or resumes, and its configuration from then on."""

    config: Config
    """Resolved configuration; an old run's is in its old form."""
    step: int = 0
    """Number of completed steps."""
    history: History = field(default_factory=History)
    """History of changes, including those of this start."""
    num_data_sets: int = 0
    """Number of data sets, the first ones, on which the run has trained already."""
    is_new: bool = True

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train; changes are then ignored."""
        return 0 < self.step == self.config.train.steps

    @property
    def changes(self) -> str:
        """The changes of this start in one line; empty if there are none."""
        row = self.history.rows[-1] if self.history.rows else None
        return row.describe() if row is not None and row.changes and row.step == self.step and not self.is_finished else ""


@dataclass(frozen=True)
class _Words:
    """The beginning and the remedy of an error message."""

    subject: str
    remedy: str


def start_of(path: Path, config: Config) -> Start:
    """Return the start of a run of `config` in this directory.

    Raises RunError if the directory holds something else, or a run that cannot continue with `config`.
    """
    if not (path / "config.toml").exists():
        if path.is_dir() and any(not child.name.startswith(".") for child in path.iterdir()):
            raise RunError(f"run_dir = {str(path)!r} holds files but no config.toml, so it is not a run: give another --run-dir")
        config = config.resolved()
        return Start(config, history=History((), values_of(config)))
    words = _Words(f"run_dir = {str(path)!r}", "give another --run-dir, or delete it")
    steps = [step_of(checkpoint) for checkpoint in list_checkpoints(path / "checkpoints")]
    start = _going_on(path, config, max(steps, default=0), words)
    if start.history.forked_from and not steps:
        raise RunError(
            f"{words.subject} is a fork of {start.history.forked_from}, but its checkpoints are gone: restore them, or delete it"
        )
    return start


def check_fork(source: Path, checkpoint: Path, config: Config) -> None:
    """Raise RunError unless a fork with `config` can continue from another run's checkpoint."""
    words = _Words(f"fork_from = {config.fork_from!r}", "give the fork the same value")
    _going_on(source, config, step_of(checkpoint), words)


def config_at(path: Path, step: int) -> tuple[Config, History]:
    """Return the configuration of a run after `step` completed steps, and its history. Raises ConfigError if it cannot be read."""
    history = History.read(path, values_of(load_run(path).resolved()))
    return config_of_run(_nested(history.values_at(step))).resolved(), history


def _going_on(path: Path, config: Config, step: int, words: _Words) -> Start:
    try:
        before, history = config_at(path, step)
    except ConfigError as error:
        raise RunError(f"{words.subject}: {error}; {words.remedy}") from None
    if config.optim.lr is None:
        config = replace(config, optim=replace(config.optim, lr=before.optim.lr))
    if not config.data.pattern:  # which was *.py once
        config = replace(config, data=replace(config.data, pattern=before.data.pattern))
    if isinstance(before.optim, OldOptimConfig):
        config = replace(config, optim=going_on(before.optim, config.optim, config.run_dir))
    config = config.resolved()
    changes = differences(values_of(before), values_of(config))
    _refuse_fixed(changes, words)
    if config.train.steps < step:
        raise RunError(
            f"train.steps = {config.train.steps} is not valid: {words.subject} has done {step} steps: give as many or "
            "more, or continue from an earlier checkpoint in another folder, with --fork-from RUN@STEP and --run-dir"
        )
    if step and "data.path" in changes:
        _check_added(*changes["data.path"], config, words)
    start = Start(config, step, history, max(1, len(before.data.path)) if step else 0, is_new=False)
    if start.is_finished:
        return start
    return replace(start, history=history.going_on(step, changes if step else {}, values_of(config)))


def _refuse_fixed(changes: dict[str, Change], words: _Words) -> None:
    different = [key for key in changes if class_of(key) == "fixed"]
    in_both = [key for key in different if None not in changes[key]]
    different = in_both or different  # name a key of both sides first: another family or rule has other keys
    if different:
        key = different[0]
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise RunError(
            f"{words.subject} belongs to another configuration: {key} is {changes[key][0]!r} there and {changes[key][1]!r} here"
            f"{more}, which cannot change during a run; {words.remedy}"
        )


def _check_added(before: Sequence[str], now: Sequence[str], config: Config, words: _Words) -> None:
    """Raise RunError if data sets were removed, or if some were added without `data.weights`."""
    counts = max(1, len(before)), max(1, len(now))
    if counts[1] < counts[0]:
        raise RunError(
            f"{words.subject} was trained on {counts[0]} data sets, and data.path names {counts[1]}: name the earlier ones "
            "first, in their order; a weight of 0 in data.weights leaves one out"
        )
    if not config.data.weights:
        raise RunError(
            f"{words.subject} was trained on {counts[0]} data sets, and data.path names {counts[1]}: give data.weights, a number for each"
        )


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn values by dotted key into nested sections."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested
