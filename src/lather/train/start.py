"""The start of a run, new, resumed or forked, and the check of which configuration fields may have
changed.

A fork is a new run directory in which a run continues from a checkpoint of another run. It copies
the checkpoint (its files are linked where the file system allows it), the rows of the metrics up to
its step, the record of the data sets, and the history and configuration as they were at that step.
After that the fork is a run like any other: it is resumed, and where its configuration differs,
that is a change (`lather.config.changes`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lather.checkpoint.folder import (
    BEST,
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    step_of,
)
from lather.config.changes import CHANGES, Change, History, class_of, differences, values_of
from lather.config.config import Config
from lather.config.fields import merged
from lather.config.kind_config import KINDS
from lather.config.optim import OptimConfig
from lather.config.run_folder import PROVENANCE, run_folder
from lather.config.toml_file import config_from_mapping, config_to_toml, load_run
from lather.data.hub_files import pinned_data
from lather.errors import ConfigError, RunError, UserError, as_toml
from lather.files import names_failing_disk, read_rows, reason, remedy_of, write_aside
from lather.train.companions import COMPANION_FOLDER

INCOMPLETE = ".fork"
"""Empty file in a run directory to which a run is being copied."""
FILES = (
    "config.toml",
    "checkpoints",
    "metrics.jsonl",
    CHANGES,
    PROVENANCE,
    "tokenizer.json",
    COMPANION_FOLDER,
)
"""Files of a run that a fork has, and a refused start leaves out. A folder with a config.toml is a
run, so that file is written last and removed first."""


@dataclass(frozen=True)
class Start:
    """The step after which a run starts or resumes, and its configuration from then on."""

    config: Config
    """Resolved configuration."""
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
        last = self.history.rows[-1:]
        if self.is_finished or not last or not last[0].changes or last[0].step != self.step:
            return ""
        return last[0].describe()


def start_of(path: Path, config: Config, steps: int | None = None) -> Start:
    """Return the start of a run of `config` in this directory. `steps`: those of `train.epochs`;
    None: not known yet, so that a run keeps the steps that it had.

    Raises RunError if the directory holds something else, or a run that cannot continue with
    `config`.
    """
    subject = f"run_dir = {str(path)!r}"
    if not (path / "config.toml").exists():
        if _visible_files(path):
            raise RunError(
                f"{subject} holds files but no config.toml, so it is not a run: give another "
                "--run-dir"
            )
        config = replace(config, data=pinned_data(config.data)).resolved()
        return Start(config, history=History((), values_of(config)))
    saved = [step_of(checkpoint) for checkpoint in list_checkpoints(path / "checkpoints")]
    remedy = "give another --run-dir, or delete it"
    start = _resumed(path, config, max(saved, default=0), subject, remedy, steps)
    if start.history.forked_from and not saved:
        raise RunError(
            f"{subject} is a fork of {start.history.forked_from}, but its checkpoints are gone: "
            "restore them, or delete it"
        )
    return start


def _visible_files(path: Path) -> bool:
    return path.is_dir() and any(not child.name.startswith(".") for child in path.iterdir())


def config_at(path: Path, step: int) -> tuple[Config, History]:
    """Return the configuration of a run after `step` completed steps, and its history. Raises
    ConfigError if it cannot be read, RunError if the run has another format."""
    history = History.read(path, values_of(load_run(path).resolved()))
    return config_from_mapping(merged({}, history.values_at(step))).resolved(), history


def _resumed(
    path: Path, config: Config, step: int, subject: str, remedy: str, steps: int | None = None
) -> Start:
    """Return the start of `config` after `step` steps of the run at `path`. Errors begin with
    `subject`; `remedy` is for another configuration; `steps` as in `start_of`."""
    try:
        before, history = config_at(path, step)
    except ConfigError as error:
        raise RunError(f"{subject}: {error}; {remedy}") from None
    may_grow = bool(config.train.epochs) and steps is None
    if config.train.epochs:
        steps = before.train.steps if steps is None else steps
        config = replace(config, train=replace(config.train, steps=steps))
    if config.optim.lr is None:
        config = replace(config, optim=replace(config.optim, lr=before.optim.lr))
    optim = _with_passed_starts(config.optim, before.optim, step)
    if config.train.steps != before.train.steps:
        optim = _with_passed_warmups(optim, before, history, step)
    config = replace(config, optim=optim)
    config = replace(config, data=pinned_data(config.data, before.data)).resolved()
    changes = differences(values_of(before), values_of(config))
    fixed = [key for key in changes if class_of(key, type(config.model)) == "fixed"]
    _refuse_fixed(fixed, changes, subject, remedy)
    if config.train.steps < step:
        many = "many (train.epochs)" if config.train.epochs else "many"
        raise RunError(
            f"train.steps = {config.train.steps} is not valid: {subject} has done {step} steps: "
            f"give as {many} or more, or continue from an earlier checkpoint in another folder, "
            "with --fork-from RUN@STEP and --run-dir"
        )
    if step and "data.path" in changes:
        _check_added(*changes["data.path"], config, subject)
    num_data_sets = max(1, len(before.data.path)) if step else 0
    start = Start(config, step, history, num_data_sets, is_new=False)
    if start.is_finished and not may_grow:  # data are opened before their epochs are counted
        return start
    return replace(start, history=history.resumed(step, changes if step else {}, values_of(config)))


def _with_passed_starts(config: OptimConfig, before: OptimConfig, step: int) -> OptimConfig:
    """Return `[optim]` without the fractions of the run whose step the run has passed: they stay at
    that step, so that a longer run does not undo what has happened."""

    def passed(kind: str, name: str) -> int:
        rule = before.rule_of(kind) if kind else before.rule
        start = getattr(rule, name, 0)
        return start if start <= step else 0

    return config.with_starts(lambda kind, name, fraction: passed(kind, name) or fraction)


def _with_passed_warmups(
    optim: OptimConfig, before: Config, history: History, step: int
) -> OptimConfig:
    """Return `[optim]` with a number of steps in place of each fraction of the run that it had at
    its start, too, and whose warm-up is over, so that a longer run does not warm up again."""
    first = history.values_at(0)

    def passed(kind: str, section: Any) -> Any:
        fraction, key = section.warmup_steps, f"optim.{kind and f'{kind}.'}warmup_steps"
        number = before.optim.schedule_of(kind).num_warmup_steps(before.train.steps)
        is_old = isinstance(fraction, float) and first.get(key) == fraction
        return replace(section, warmup_steps=number) if is_old and number <= step else section

    return replace(passed("", optim), **{kind: passed(kind, optim.section(kind)) for kind in KINDS})


def _refuse_fixed(fixed: list[str], changes: dict[str, Change], subject: str, remedy: str) -> None:
    if not fixed:
        return
    # another family or rule has other keys: name those of both
    fixed = [key for key in fixed if None not in changes[key]] or fixed
    key = fixed[0]
    more = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
    theirs, ours = map(as_toml, changes[key])
    raise RunError(
        f"{subject} belongs to another configuration: {key} is {theirs} there and {ours} here"
        f"{more}, which cannot change during a run; {remedy}"
    )


def _check_added(before: Sequence[str], now: Sequence[str], config: Config, subject: str) -> None:
    """Raise RunError if data sets were removed, or if some were added without `data.weights`."""
    old, new = max(1, len(before)), max(1, len(now))
    counts = f"{subject} was trained on {old} data sets, and data.path names {new}"
    if new < old:
        raise RunError(
            f"{counts}: name the earlier ones first, in their order; a weight of 0 in data.weights "
            "leaves one out"
        )
    if not config.data.weights:
        raise RunError(f"{counts}: give data.weights, a number for each")


def fork_source(path: Path, config: Config) -> tuple[Path, Path] | None:
    """Return the run and the checkpoint to copy to `path`; None if there is nothing to copy, or it
    was copied before. RUN and RUN@best of `fork_from` match any step of that run.

    Raises RunError if `path` holds something else or another fork, if there is no such checkpoint,
    or if `config` cannot continue from it.
    """
    if not config.fork_from:
        return None
    if (path / "config.toml").exists():
        forked_from = History.read(path, {}).forked_from
        if not is_fork_of(forked_from, config.fork_from):
            was = f"was forked from {forked_from}" if forked_from else "is not a fork"
            raise RunError(
                f"run_dir = {str(path)!r} holds a run that {was}: give another --run-dir, or leave "
                "out --fork-from"
            )
        return None
    if _visible_files(path) and not (path / INCOMPLETE).exists():
        raise RunError(
            f"run_dir = {str(path)!r} holds files: give the fork a --run-dir that is empty or does "
            "not exist"
        )
    subject = f"fork_from = {config.fork_from!r}"
    run, at, step = config.fork_from.rpartition("@")
    if at and all((Path(folder) / "config.toml").exists() for folder in (config.fork_from, run)):
        raise RunError(
            f"{subject} may mean checkpoint {step} of {run}, or the run {config.fork_from}: rename "
            "that folder"
        )
    try:
        source, checkpoint = find_checkpoint(config.fork_from)
    except UserError as error:
        raise RunError(f"{subject}: {error}") from None
    _resumed(source, config, step_of(checkpoint), subject, "give the fork the same value")
    return source, checkpoint


def is_fork_of(forked_from: str, name: str) -> bool:
    """Return whether `forked_from`, "RUN@STEP", is a checkpoint that `name` may mean, which is RUN,
    RUN@STEP or RUN@best. The first run need not exist any more."""
    run, _, step = forked_from.rpartition("@")
    folder, _, wanted = name.rpartition("@")
    return bool(run) and (
        _is_same_run(name, run)
        or (_is_same_run(folder, run) and wanted.lstrip("0") in (step.lstrip("0"), BEST))
    )


def _is_same_run(name: str, run: str) -> bool:
    return run_folder(Path(name)).resolve() == Path(run).resolve()


def copy_run(source: Path, checkpoint: Path, target: Path) -> None:
    """Copy a run as it was at a checkpoint to `target`, a folder without files.

    Raises RunError if a file cannot be read or written; everything copied is then removed.
    """
    step = step_of(checkpoint)
    try:
        remove_run(target)
        (target / INCOMPLETE).touch()
        copied = checkpoint_path(target / "checkpoints", step)
        copied.mkdir(parents=True)
        for file in checkpoint.iterdir():
            with names_failing_disk(copied):
                _link(file, copied / file.name)
        for name in (PROVENANCE, "tokenizer.json", COMPANION_FOLDER):
            _copy(source / name, target / name)
        rows = [row for row in read_rows(source / "metrics.jsonl") if row["step"] <= step]
        (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config, history = config_at(source, step)
        history = history.forked(f"{source}@{step}", step, values_of(config))
        write_aside(target / CHANGES, history.to_jsonl())
        write_aside(target / "config.toml", config_to_toml(config))
        (target / INCOMPLETE).unlink()
    except OSError as error:
        why = f"{error.filename or target}: {reason(error, target)}"
        remove_run(target)
        remedy = remedy_of(error) or "give another --run-dir"
        raise RunError(
            f"run_dir = {str(target)!r}: {checkpoint} cannot be copied to it ({why}): {remedy}"
        ) from None


def remove_run(target: Path) -> None:
    """Remove the files of a run that has not started."""
    for name in FILES:
        path = target / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    (target / INCOMPLETE).unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder if it exists."""
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copyfile(source, target)


def _link(source: Path, target: Path) -> None:
    """Link a file of a checkpoint, which never changes; copy it if it cannot be linked."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
