"""The run directory: whose it is, who is writing it, and where everything in it lies.

config.toml        the resolved configuration        metrics.jsonl   a row per step
provenance.json    versions, commit, data sets       loss.png        the picture
tokenizer.json     the data set's                    checkpoints/    complete ones only
huggingface/       what belongs to the tokenizer     changes.jsonl   what was changed, and when
memory.json        planned and seen bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import subprocess
from pathlib import Path
from typing import IO, Any

import torch

import lather
from lather.config.changes import CHANGES
from lather.config.config import Config
from lather.config.toml_file import config_to_toml
from lather.errors import RunError, UserError
from lather.files import reason, write_aside
from lather.train.companions import keep_companions
from lather.train.fork import copy_run, fork_source, remove_copy
from lather.train.resume import Start, start_of
from lather.train.run_data import RunData


class RunDirectory:
    """An open run directory, locked until the process ends or `close`."""

    def __init__(self, path: Path, lock: IO[str], start: Start, *, is_made: bool) -> None:
        """`is_made`: whether this start has made the folder."""
        self.path, self.start = path, start
        self._lock, self._is_made = lock, is_made
        self._is_fork = False

    @classmethod
    def open(cls, config: Config) -> RunDirectory:
        """Make it, fork it from `config.fork_from`, or take up the one that is there.

        A run that is there is not changed before `record`. Raises RunError if the folder cannot be written, is in use, holds something
        else, or if a field that is fixed for a run is another one.
        """
        path = Path(config.run_dir)
        if fork_source(path, config) is None:
            start_of(path, config)
        is_made = not path.exists()
        opened = cls(path, _lock(path), Start(config, is_new=is_made), is_made=is_made)
        try:
            source = fork_source(path, config)  # another process may have been first
            if source is not None:
                opened._is_fork = True
                copy_run(*source, path)
            opened.start = start_of(path, config)
            if opened.start.is_new:
                write_aside(path / "config.toml", config_to_toml(opened.start.config))
        except UserError:
            opened.abandon()
            opened.close()
            raise
        return opened

    @property
    def config(self) -> Config:
        """The run's configuration from this start on."""
        return self.start.config

    def begun_with(self) -> str | None:
        """The data set of a run that was begun when data sets had format 1 (`lather.data.format1`)."""
        record = self._record()
        return None if record is None else record.get("dataset")

    def check_data(self, data: RunData) -> None:
        """Raise RunError if the run has learned from other data sets than the first of these."""
        record = self._record()
        if record is None or "dataset" in record:
            return
        before, now = data_sets_of(record)[: self.start.num_data_sets], list(data.identities.items())
        if [identity for _, identity in now[: len(before)]] != [identity for _, identity in before]:
            raise RunError(
                f"run_dir = {str(self.path)!r} was trained on other tokens ({', '.join(folder for folder, _ in before)}) than there are "
                f"now ({', '.join(data.identities)}): restore the text, or give another --run-dir; data sets that are added to a run come "
                "after its own in data.path, and a weight of 0 leaves one out"
            )

    def record(self, data: RunData) -> None:
        """Record what the run is from now on: its configuration and what changed in it, its data sets, and their tokenizer.

        History and configuration are replaced in one go, so that a start that is killed in here does not change what the next one takes
        for the past. Raises RunError, before anything is written, as `check_data` does.
        """
        self.check_data(data)
        mine, theirs = self.path / "tokenizer.json", data.tokenizer
        if theirs is not None and not (mine.exists() and mine.read_bytes() == theirs.read_bytes()):
            write_aside(mine, theirs.read_bytes())
        if self.start.is_finished:
            return
        if self.start.history.rows or (self.path / CHANGES).exists():
            _replace(self.path / CHANGES, self.start.history.to_jsonl())
        _replace(self.path / "config.toml", config_to_toml(self.start.config))
        record, data_sets = self._record(), [list(pair) for pair in data.identities.items()]
        if record is None:
            keep_companions(self.path, self.start.config)
            write_aside(self.path / "provenance.json", json.dumps({"data": data_sets, **provenance()}, indent=1))
        elif "data" in record and [identity for _, identity in data_sets_of(record)] != [identity for _, identity in data_sets]:
            write_aside(self.path / "provenance.json", json.dumps({**record, "data": data_sets}, indent=1))

    def _record(self) -> dict[str, Any] | None:
        """The record of what the run was begun with. Raises RunError if it is damaged."""
        file = self.path / "provenance.json"
        if not file.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(file.read_text())
            if not isinstance(record.get("dataset", ""), str) or not ("dataset" in record or data_sets_of(record)):
                raise ValueError("no data set")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunError(f"{file}: damaged: delete {self.path} to start again") from None
        return record

    def abandon(self) -> None:
        """Leave no trace of a run that could not start; one that was there before stays as it is."""
        if self._is_fork:
            remove_copy(self.path)
        elif self.start.is_new:
            for name in ("config.toml", "provenance.json", "tokenizer.json"):
                (self.path / name).unlink(missing_ok=True)
        else:
            return
        (self.path / ".lock").unlink(missing_ok=True)
        if self._is_made:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def close(self) -> None:
        self._lock.close()


def _lock(path: Path) -> IO[str]:
    """Make the folder, and hold it against other processes. Raises RunError if it cannot be written, or is held."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("a")
    except OSError as error:
        raise RunError(f"run_dir = {str(path)!r} cannot be written ({reason(error, path)}): give another --run-dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunError(f"run_dir = {str(path)!r} is in use by another process: wait for it, or give another --run-dir") from None
    return lock


def data_sets_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Folder and identity of each data set in a run's provenance.json, which had them as a mapping once."""
    data = record["data"]
    return [(str(folder), str(identity)) for folder, identity in (data.items() if isinstance(data, dict) else data)]


def _replace(path: Path, text: str) -> None:
    """Replace the file in one go, unless it has this text already."""
    if not path.exists() or path.read_text("utf-8") != text:
        write_aside(path, text)


def provenance() -> dict[str, Any]:
    """The versions and the machine, on which the numbers of a run may depend besides its configuration."""
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
