"""Forks: a new run directory in which a run continues from a checkpoint of another run.

A fork copies the checkpoint (its files are linked where the file system allows it), the rows of the metrics up to its step, the record of
the data sets, and the history and configuration as they were at that step. After that the fork is a run like any other: it is resumed, and
where its configuration differs, that is a change (`lather.config.changes`).
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from pathlib import Path

from lather.checkpoint.find import find_checkpoint
from lather.checkpoint.folder import checkpoint_path, step_of
from lather.config.changes import CHANGES, History, Row, values_of
from lather.config.config import Config
from lather.config.toml_file import config_to_toml
from lather.errors import RunError, UserError
from lather.files import read_rows, reason
from lather.train.companions import COMPANION_FOLDER
from lather.train.resume import check_fork, config_at

ASIDE = ".fork"
"""Folder in which the copy is built; it exists only while the copy is incomplete."""
COPIED = ("checkpoints", "metrics.jsonl", CHANGES, "provenance.json", "tokenizer.json", COMPANION_FOLDER, "config.toml")
"""Copied files, in the order in which they are moved into place: config.toml is last, because a folder with a config.toml is a run."""


def fork_source(path: Path, config: Config) -> tuple[Path, Path] | None:
    """Return the run and the checkpoint to copy to `path`; None if there is nothing to copy, or it was copied before.

    Raises RunError if `path` holds something else, or if `config` cannot continue from that checkpoint.
    """
    if not config.fork_from:
        return None
    if (path / "config.toml").exists():
        _check_same_fork(path, config.fork_from)
        return None
    if path.is_dir() and not (path / ASIDE).exists() and any(not child.name.startswith(".") for child in path.iterdir()):
        raise RunError(f"run_dir = {str(path)!r} holds files: give the fork a --run-dir that is empty or does not exist")
    source, checkpoint = find_fork(config.fork_from)
    check_fork(source, checkpoint, config)
    return source, checkpoint


def find_fork(name: str) -> tuple[Path, Path]:
    """Return the run and the checkpoint that RUN, RUN@STEP or RUN@best names.

    Raises RunError if there is none, or if RUN and a folder named RUN@STEP both are runs.
    """
    run, at, step = name.rpartition("@")
    if at and all((Path(folder) / "config.toml").exists() for folder in (name, run)):
        raise RunError(
            f"fork_from = {name!r} may mean checkpoint {step} of {run}, or the run {name}: "
            f"rename that folder, or give {name}@STEP for one of its checkpoints"
        )
    try:
        return find_checkpoint(name)
    except UserError as error:
        raise RunError(f"fork_from = {name!r}: {error}") from None


def _check_same_fork(path: Path, name: str) -> None:
    """Raise RunError unless the run was forked from `name`; RUN and RUN@best match any step of that run."""
    forked_from = History.read(path, {}).forked_from
    if not is_of_fork(forked_from, name):
        was = f"was forked from {forked_from}" if forked_from else "is not a fork"
        raise RunError(f"run_dir = {str(path)!r} holds a run that {was}: give another --run-dir, or leave out --fork-from")


def is_of_fork(forked_from: str, name: str) -> bool:
    """Return whether `forked_from`, "RUN@STEP", is a checkpoint that `name` may mean, whichever way the folder and the step are spelled."""
    run, _, step = forked_from.rpartition("@")
    asked, at, asked_step = name.rpartition("@")
    readings = [(name, "")] + ([(asked, asked_step)] if at else [])
    return bool(run) and any(
        Path(folder).resolve() == Path(run).resolve() and (not number.isdigit() or int(number) == int(step)) for folder, number in readings
    )


def copy_run(source: Path, checkpoint: Path, target: Path) -> None:
    """Copy a run as it was at a checkpoint to `target`, a folder without files, which becomes a run only when the copy is complete.

    Raises RunError if a file cannot be read or written; everything copied is then removed.
    """
    step, aside = step_of(checkpoint), target / ASIDE
    try:
        remove_copy(target)
        aside.mkdir()
        shutil.copytree(checkpoint, checkpoint_path(aside / "checkpoints", step), copy_function=_link)
        for name in ("provenance.json", "tokenizer.json"):
            if (source / name).exists():
                shutil.copyfile(source / name, aside / name)
        if (source / COMPANION_FOLDER).is_dir():
            shutil.copytree(source / COMPANION_FOLDER, aside / COMPANION_FOLDER)
        rows = [row for row in read_rows(source / "metrics.jsonl") if row["step"] <= step]
        (aside / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config, history = config_at(source, step)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        kept = [row for row in history.rows if row.step < step]
        forked = History((*kept, Row(step, {}, now, f"{source}@{step}")), values_of(config))
        (aside / CHANGES).write_text(forked.to_jsonl(), "utf-8")
        (aside / "config.toml").write_text(config_to_toml(config), "utf-8")
        for name in COPIED:
            if (aside / name).exists():
                (aside / name).rename(target / name)
        aside.rmdir()
    except OSError as error:
        why = f"{error.filename or target}: {reason(error, target)}"
        remove_copy(target)
        raise RunError(f"run_dir = {str(target)!r}: {checkpoint} cannot be copied to it ({why}): free some space there") from None


def remove_copy(target: Path) -> None:
    """Remove all that `copy_run` has copied, complete or not; config.toml first."""
    for name in reversed(COPIED):
        path = target / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    shutil.rmtree(target / ASIDE, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Link a file, since checkpoint files never change; copy it if it cannot be linked."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
