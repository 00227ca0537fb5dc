"""The run directory: whose it is, who is writing it, and where everything in it lies.

config.toml        the resolved configuration        metrics.jsonl   a row per step
provenance.json    versions, commit, data sets       loss.png        the picture
tokenizer.json     the data set's                    checkpoints/    complete ones only
changes.jsonl      what was changed, and when
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

import lather
from lather.errors import ConfigError, RunError
from lather.train.changes import CHANGES, Change, History, class_of, differences, values_of
from lather.train.checkpoint import list_checkpoints, step_of
from lather.train.config import Config
from lather.train.config_file import config_to_toml, load_run
from lather.train.fork import copy_run, find_fork, is_of_fork
from lather.train.old_runs import OldOptimConfig, going_on
from lather.train.run_data import RunData


@dataclass(frozen=True)
class Start:
    """From where a run goes on, and as what."""

    config: Config
    """Resolved, in the terms of the time when the run was begun."""
    step: int = 0
    """Steps that are done."""
    history: History = field(default_factory=History)
    """With what changes at this step."""
    is_new: bool = True

    @property
    def changes(self) -> str:
        """What changes with this start, in a line for the reader; empty: nothing."""
        row = self.history.rows[-1] if self.history.rows else None
        return row.describe() if row is not None and row.changes and row.step == self.step else ""


class RunDirectory:
    """An open run directory, locked until the process ends or `close`."""

    def __init__(self, path: Path, lock: IO[str], start: Start, *, is_fork: bool) -> None:
        """`is_fork`: whether it was copied from another run by this start."""
        self.path, self.start = path, start
        self._lock, self._is_fork = lock, is_fork

    @classmethod
    def open(cls, config: Config) -> RunDirectory:
        """Make it, fork it from `config.fork_from`, or take up the one that is there.

        A run that is there is not changed before `record`. Raises RunError if the folder cannot be written, is in use, holds something
        else, or if a field that is fixed for a run is another one.
        """
        path = Path(config.run_dir)
        is_fork = _fork(path, config)
        _start(path, config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("a")
        except OSError as error:
            raise RunError(f"run_dir = {config.run_dir!r} cannot be written ({error.strerror}): give another --run-dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise RunError(f"run_dir = {config.run_dir!r} is in use by another process: wait for it, or give another --run-dir") from None
        start = _start(path, config)  # another process may have been first
        if start.is_new:
            write_aside(path / "config.toml", config_to_toml(start.config))
        return cls(path, lock, start, is_fork=is_fork)

    @property
    def config(self) -> Config:
        """The run's configuration from this start on."""
        return self.start.config

    def begun_with(self) -> str | None:
        """The data set of a run that was begun when data sets had format 1 (`lather.data.format1`)."""
        record = self._record()
        return None if record is None else record.get("dataset")

    def check_data(self, data: RunData) -> None:
        """Raise RunError if the run was trained on other data sets than these, of which the last may be new."""
        record = self._record()
        if record is None or "dataset" in record:
            return
        before, now = list(record["data"].values()), list(data.identities.values())
        if now[: len(before)] != before:
            raise RunError(
                f"run_dir = {str(self.path)!r} was trained on other tokens ({', '.join(record['data'])}) than there are now "
                f"({', '.join(data.identities)}): restore the text, or give another --run-dir; data sets that are added to a run come "
                "after its own in data.path, and a weight of 0 leaves one out"
            )

    def record(self, data: RunData) -> None:
        """Record what the run is from now on: its configuration and what changed in it, its data sets, and their tokenizer.

        Raises RunError, before anything is written, as `check_data` does.
        """
        self.check_data(data)
        mine, theirs = self.path / "tokenizer.json", data.tokenizer
        if theirs is not None and not (mine.exists() and mine.read_bytes() == theirs.read_bytes()):
            shutil.copyfile(theirs, self.path / ".tmp-tokenizer.json")
            (self.path / ".tmp-tokenizer.json").rename(mine)
        if self.start.history != History.read(self.path):
            write_aside(self.path / CHANGES, self.start.history.to_jsonl())
        text = config_to_toml(self.start.config)
        if text != (self.path / "config.toml").read_text("utf-8"):
            write_aside(self.path / "config.toml", text)
        record = self._record()
        if record is None:
            write_aside(self.path / "provenance.json", json.dumps({"data": data.identities, **provenance()}, indent=1))
        elif "data" in record and len(data.identities) > len(record["data"]):
            added = list(data.identities.items())[len(record["data"]) :]
            write_aside(self.path / "provenance.json", json.dumps({**record, "data": {**record["data"], **dict(added)}}, indent=1))

    def _record(self) -> dict[str, Any] | None:
        """What the run was begun with. Raises RunError if that is damaged."""
        file = self.path / "provenance.json"
        if not file.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(file.read_text())
            if not isinstance(record.get("dataset", ""), str) or not ("dataset" in record or record["data"].values()):
                raise ValueError("no data set")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunError(f"{file}: damaged: delete {self.path} to start again") from None
        return record

    def abandon(self) -> None:
        """Leave no trace of a run that could not start; one that was there before stays as it is."""
        if self._is_fork:
            shutil.rmtree(self.path)
        elif self.start.is_new:
            for name in ("config.toml", "provenance.json", "tokenizer.json", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def close(self) -> None:
        self._lock.close()


def _start(path: Path, config: Config, step: int | None = None) -> Start:
    """The start of `config` in this directory, after `step` steps; None: where its newest checkpoint is.

    Raises RunError if the directory is not such a run's.
    """
    if not (path / "config.toml").exists():
        if path.is_dir() and any(not child.name.startswith(".") for child in path.iterdir()):
            raise RunError(f"run_dir = {str(path)!r} holds files but no config.toml, so it is not a run: give another --run-dir")
        return Start(config.resolved())
    try:
        before = load_run(path).resolved()
    except ConfigError as error:
        raise RunError(f"{error}; give another --run-dir, or delete {path}") from None
    if config.optim.lr is None:
        config = replace(config, optim=replace(config.optim, lr=before.optim.lr))
    if isinstance(before.optim, OldOptimConfig):
        config = replace(config, optim=going_on(before.optim, config.optim, config.run_dir))
    config = config.resolved()
    if step is None:
        step = max((step_of(checkpoint) for checkpoint in list_checkpoints(path / "checkpoints")), default=0)
    history = History.read(path)
    changes = differences(history.undone(values_of(before), step), values_of(config))
    _refuse_fixed(path, changes)
    if "data.path" in changes:
        _check_added(path, *changes["data.path"], config)
    if config.train.steps < step:
        raise RunError(
            f"train.steps = {config.train.steps} is not valid: {step} steps of run_dir = {str(path)!r} are done: give as many or more, "
            "or go on from an earlier checkpoint in another folder, with --fork-from RUN@STEP and --run-dir"
        )
    return Start(config, step, history.going_on(step, changes) if step else History(), is_new=False)


def _refuse_fixed(path: Path, changes: dict[str, Change]) -> None:
    different = [key for key in changes if class_of(key) == "fixed"]
    in_both = [key for key in different if None not in changes[key]]
    different = in_both or different  # another family, or rule, has other keys
    if different:
        key = different[0]
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise RunError(
            f"run_dir = {str(path)!r} belongs to another configuration: {key} is {changes[key][0]!r} there and {changes[key][1]!r} here"
            f"{more}, which cannot change during a run; give another --run-dir, or delete it"
        )


def _check_added(path: Path, before: Sequence[str], now: Sequence[str], config: Config) -> None:
    """Raise RunError if a run has lost a data set, or has more of them and no weights."""
    counts = max(1, len(before)), max(1, len(now))
    if counts[1] < counts[0]:
        raise RunError(
            f"run_dir = {str(path)!r} has learned from {counts[0]} data sets, and data.path names {counts[1]}: leave those of "
            "before in it, first and in their order; a weight of 0 in data.weights leaves one out"
        )
    if not config.data.weights:
        raise RunError(
            f"run_dir = {str(path)!r} has learned from {counts[0]} data sets, and there are {counts[1]} now: "
            "give data.weights, a number for each"
        )


def _fork(path: Path, config: Config) -> bool:
    """Copy the run of `config.fork_from`, if there is none here yet; whether it did. Raises RunError if that cannot go on as `config`."""
    if not config.fork_from:
        return False
    if (path / "config.toml").exists():
        forked_from = History.read(path).forked_from
        if not is_of_fork(forked_from, config.fork_from):
            was = f"was forked from {forked_from}" if forked_from else "is no fork"
            raise RunError(f"run_dir = {str(path)!r} holds a run that {was}: give another --run-dir, or leave out --fork-from")
        return False
    if path.is_dir() and any(path.iterdir()):
        raise RunError(f"run_dir = {str(path)!r} holds files: give a --run-dir for the fork that does not exist")
    source, checkpoint = find_fork(config.fork_from)
    _start(source, config, step_of(checkpoint))
    copy_run(source, checkpoint, path)
    return True


def write_aside(path: Path, text: str) -> None:
    """Replace the file in one go."""
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_text(text, "utf-8")
    aside.rename(path)


def provenance() -> dict[str, Any]:
    """What the numbers of a run may depend on besides its configuration."""
    return {
        "lather": lather.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _commit() -> str | None:
    """The commit of the checkout that this file is tracked in, if it is in one."""
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
