"""The run directory: whose it is, who is writing it, and where everything in it lies.

config.toml        the resolved configuration        metrics.jsonl   a row per step
provenance.json    versions, commit, data set        loss.png        the picture
tokenizer.json     the data set's                    checkpoints/    complete ones only
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

import lather
from lather.errors import ConfigError, RunError
from lather.train.config import Config
from lather.train.config_file import config_to_toml, load_run
from lather.train.old_runs import OldOptimConfig, going_on
from lather.train.run_data import RunData

FREE = ("checkpoint", "log", "run_dir", "parallel", "moe.memory", "data.path", "data.source", "data.cache_dir", "data.validation")
"""Sections and keys that may change between the starts of a run: they do not touch what it computes (`parallel` and `moe.memory`: but for
rounding; `data`: which tokens are learned is compared by their checksums)."""


class RunDirectory:
    """An open run directory, locked until the process ends or `close`."""

    def __init__(self, path: Path, lock: IO[str], config: Config, *, is_new: bool) -> None:
        """`config`: in the terms of the time when the run was begun."""
        self.path, self.config = path, config
        self._lock = lock
        self._is_new = is_new

    @classmethod
    def open(cls, config: Config) -> RunDirectory:
        """Make it, or take up the one that is there. Nothing is written before it is known to be this configuration's.

        Raises RunError if it cannot be written, is in use, holds something else, or belongs to another configuration.
        """
        path = Path(config.run_dir)
        _in_its_terms(path, config)
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
        config = _in_its_terms(path, config)  # another process may have been first
        is_new = not (path / "config.toml").exists()
        write_aside(path / "config.toml", config_to_toml(config))
        return cls(path, lock, config, is_new=is_new)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def begun_with(self) -> str | None:
        """The data set of a run that was begun when data sets had format 1 (`lather.data.format1`)."""
        record = self._record()
        return None if record is None else record.get("dataset")

    def adopt_data(self, data: RunData) -> None:
        """Record which data sets the run trains on and keep their tokenizer; raises RunError if they were others before."""
        record = self._record()
        if record is not None and "dataset" not in record and list(record["data"].values()) != list(data.identities.values()):
            raise RunError(
                f"run_dir = {str(self.path)!r} was trained on other tokens ({', '.join(record['data'])}) than there are now "
                f"({', '.join(data.identities)}): restore the text, or give another --run-dir"
            )
        mine, theirs = self.path / "tokenizer.json", data.tokenizer
        if theirs is not None and not (mine.exists() and mine.read_bytes() == theirs.read_bytes()):
            shutil.copyfile(theirs, self.path / ".tmp-tokenizer.json")
            (self.path / ".tmp-tokenizer.json").rename(mine)
        if record is None:
            write_aside(self.path / "provenance.json", json.dumps({"data": data.identities, **provenance()}, indent=1))

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
        if self._is_new:
            for name in ("config.toml", "provenance.json", "tokenizer.json", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def close(self) -> None:
        self._lock.close()


def _in_its_terms(path: Path, config: Config) -> Config:
    """The configuration, resolved, as the run in this directory has it. Raises RunError if the directory is not such a run's."""
    if not (path / "config.toml").exists():
        if path.is_dir() and any(not child.name.startswith(".") for child in path.iterdir()):
            raise RunError(f"run_dir = {config.run_dir!r} holds files but no config.toml, so it is not a run: give another --run-dir")
        return config.resolved()
    try:
        before = load_run(path).resolved()
    except ConfigError as error:
        raise RunError(f"{error}; give another --run-dir, or delete {path}") from None
    if config.optim.lr is None:
        config = replace(config, optim=replace(config.optim, lr=before.optim.lr))
    if isinstance(before.optim, OldOptimConfig):
        config = replace(config, optim=going_on(before.optim, config.optim, config.run_dir))
    config = config.resolved()
    mine, theirs = _flat(asdict(config)), _flat(asdict(before))
    keys = (key for key in {**mine, **theirs} if not {key, key.partition(".")[0]} & set(FREE))
    different = [key for key in keys if mine.get(key) != theirs.get(key)]
    different = [key for key in different if key in mine and key in theirs] or different  # another family, or rule, has other keys
    if different:
        key = different[0]
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise RunError(
            f"run_dir = {config.run_dir!r} belongs to another configuration: "
            f"{key} is {theirs.get(key)!r} there and {mine.get(key)!r} here{more}; give another --run-dir, or delete it"
        )
    return config


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in mapping.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


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
