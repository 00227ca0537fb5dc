"""Makes the runs of a study, each in its process on one core, and writes a row to
`rows.jsonl` when a run is done.

The parent starts processes, and it alone writes rows. If parent or children are killed at any
moment, the same command goes on: finished runs have their rows, half-finished ones their
checkpoints. A child whose parent is gone saves and ends. A run that ends without a row is tried
once more; then the study stops with its error.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.convergence.study import Row, Study, Trial, rows_by_key
from benchmarks.convergence.training import forget, perform
from lather.data.opening import open_datasets
from lather.errors import RunError, UserError
from lather.files import lock_folder
from lather.sweep.queue import ProcessQueue

FORK = multiprocessing.get_context("fork")
"""Starts children that have torch imported already, so that they start in milliseconds."""
LOCK_TRIES = 60
"""How often the lock is tried, once a second, while children of a killed process still hold it."""


@dataclass
class Queue:
    """The state of a study in a folder."""

    study: Study
    folder: Path
    workers: int
    common: Row
    """The part that all rows share: commit, hardware, versions."""
    report: Callable[[str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def work(self, seconds: float) -> bool:
        """Make runs until none is wanted, or for about `seconds`; returns whether the study is
        done."""
        # children hold the lock, too: after a kill it is free when the last of them has saved
        with self._lock():
            self.rows = read_rows(self.folder / "rows.jsonl")
            self._prepare_data()
            return ProcessQueue(self.workers, self._wanted, self._start, self._ended).work(seconds)

    def _lock(self) -> IO[str]:
        """Lock the folder, which children of a killed process may still hold for a while."""
        for _ in range(LOCK_TRIES - 1):
            with contextlib.suppress(RunError):
                return lock_folder(self.folder, str(self.folder), "--out")
            time.sleep(1)
        return lock_folder(self.folder, str(self.folder), "--out")

    def _wanted(self) -> dict[str, Trial]:
        return {trial.key: trial for trial in self.study.wanted(self.rows)}

    def _prepare_data(self) -> None:
        """Make the data sets in a process that then ends, before several processes would make them
        at once."""
        for trial in {trial.setting: trial for trial in self.study.wanted(self.rows)}.values():
            config = trial.config(self.folder)
            process = FORK.Process(
                target=open_datasets, args=(config.data, config.model.vocab_size, self.report)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise UserError(
                    f"the data of setting {trial.setting!r} cannot be prepared; see above"
                )

    def _start(self, trial: Trial, place: int) -> BaseProcess:
        process = FORK.Process(target=_child, args=(trial, self._place(trial), os.getpid()))
        process.start()
        return process

    def _place(self, trial: Trial) -> Path:
        return self.folder / "runs" / trial.key

    def _ended(self, trial: Trial, code: int | None) -> None:
        result = self._place(trial) / "row.json"
        if result.exists():
            self._keep(trial, json.loads(result.read_text()))
        else:
            self._failed(trial, code)

    def _keep(self, trial: Trial, row: Row) -> None:
        row = {**self.common, "study": self.study.name, **row}
        append_row(self.folder / "rows.jsonl", row)
        self.rows[trial.key] = row
        forget(self._place(trial))
        final = "diverged" if row["final"] is None else f"{row['final']:.4f}"
        rates = " / ".join(f"{rate:g}" for rate in trial.rates)
        left = len(self.study.wanted(self.rows))
        self.report(
            f"{trial.setting} {trial.contestant} {rates} seed {trial.seed}: {final}  "
            f"({row['seconds']:.0f} s; {left} more known)"
        )

    def _failed(self, trial: Trial, code: int | None) -> None:
        self.failures[trial.key] = self.failures.get(trial.key, 0) + 1
        if self.failures[trial.key] > 1:
            error = self._place(trial) / "error.txt"
            text = (
                error.read_text() if error.exists() else f"its process ended with exit code {code}"
            )
            raise UserError(
                f"run {trial.key} ({trial.setting}, {trial.contestant}, seed {trial.seed}) failed "
                f"twice: {text}"
            )


def _child(trial: Trial, folder: Path, parent: int) -> None:
    """Perform a run on one core, in the child; it leaves `row.json` or `error.txt`."""
    if (folder / "row.json").exists():  # it ended while the queue was being stopped
        os._exit(0)
    # Ctrl-C reaches the parent, which tells the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        row = perform(trial, folder / "run", lambda: stopped or os.getppid() != parent)
        if row is not None:
            aside = folder / "row.partial.json"
            aside.write_text(json.dumps(row))
            aside.rename(folder / "row.json")
    except UserError as error:
        (folder / "error.txt").write_text(str(error))
        os._exit(1)
    except BaseException:
        (folder / "error.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def read_rows(path: Path) -> dict[str, Row]:
    """Read the rows of a file by key; a last line that a kill cut short is dropped and cut from the
    file."""
    if not path.exists():
        return {}
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return rows_by_key(json.loads(line) for line in whole.splitlines())


def append_row(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
