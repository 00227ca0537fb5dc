"""Forks: a run that goes on from a checkpoint of another one, in a directory of its own.

What is copied is the checkpoint (its files are linked where the file system can), the rows of the metrics up to its step, the history, the
configuration and the record of the data. From there on the fork is a run like any other: it is resumed, and what its configuration has
otherwise than the first run had at that step is a change (`lather.train.changes`).
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from pathlib import Path

from lather.errors import RunError, UserError
from lather.train.changes import CHANGES, History, Row
from lather.train.checkpoint import checkpoint_path, step_of
from lather.train.find import find_checkpoint
from lather.train.metrics import read_rows


def find_fork(name: str) -> tuple[Path, Path]:
    """Return the run and the checkpoint that RUN, RUN@STEP or RUN@best means. Raises RunError if there is no such one."""
    try:
        return find_checkpoint(name)
    except UserError as error:
        raise RunError(f"fork_from = {name!r}: {error}") from None


def is_of_fork(forked_from: str, name: str) -> bool:
    """Whether a run that was forked from "RUN@STEP" is what `name` asks for; without a step, or as the best one, any of RUN's is."""
    if Path(name).is_dir():
        return forked_from.rpartition("@")[0] == str(Path(name))
    run, _, step = name.rpartition("@")
    return forked_from == f"{Path(run)}@{step}" if step.isdigit() else forked_from.rpartition("@")[0] == str(Path(run or step))


def copy_run(source: Path, checkpoint: Path, target: Path) -> None:
    """Make `target` a copy of a run as it was at a checkpoint; complete or absent. Raises RunError if it cannot be written or read."""
    step, aside = step_of(checkpoint), target.with_name(f".{target.name}.fork")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        copy = checkpoint_path(aside / "checkpoints", step)
        shutil.copytree(checkpoint, copy, copy_function=_link)
        for name in ("config.toml", "provenance.json", "tokenizer.json"):
            if (source / name).exists():
                shutil.copyfile(source / name, aside / name)
        rows = [row for row in read_rows(source / "metrics.jsonl") if row["step"] <= step]
        (aside / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fork = Row(step, {}, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), f"{source}@{step}")
        (aside / CHANGES).write_text(History((*History.read(source).rows, fork)).to_jsonl(), "utf-8")
        aside.rename(target)
    except OSError as error:
        raise RunError(f"run_dir = {str(target)!r} cannot be made a copy of {checkpoint} ({error})") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Link a file, which nobody changes, or copy it where that cannot be done."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
