"""The work of a sweep: a process of `lather train` for each run that is missing, a table meanwhile,
and the best configuration and a picture at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

import tomli_w
import torch
from rich.console import Console
from rich.live import Live

from lather.config.toml_file import values_of_config
from lather.console import FittedTable, is_live, titled_table
from lather.cores import num_cores
from lather.files import optional_file, read_text, write_aside
from lather.sweep.child import run_command
from lather.sweep.grid import GridRun, folder_name, short_names, words_for
from lather.sweep.queue import ProcessQueue
from lather.sweep.record import SweepFolder
from lather.sweep.results import (
    LOSSES,
    RunResult,
    SweepRow,
    Weights,
    best_of,
    last_step,
    notes_on,
    result_of,
    rows_of,
)

SHOWN_SECONDS = 1.0
"""Seconds from one table on a terminal to the next."""


@dataclass
class SweepWork:
    """The runs of a sweep, and what is known of them."""

    folder: SweepFolder
    runs: Sequence[GridRun]
    """All runs of the folder."""
    keys: Sequence[str]
    """Keys of the runs to make; other runs keep the results that they have."""
    jobs: int
    nproc: int
    console: Console
    results: dict[str, RunResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """The reason why a run has ended in this process without a result, by its key."""
    data_paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Folders of the data sets that a run takes, by its key, also if their texts change while
    others run."""
    weights: Weights = "raw"
    """The weights whose losses count."""
    queue: ProcessQueue[GridRun] = field(init=False)
    live: Live | None = field(init=False, default=None)
    shown: float = 0.0
    """When a table was shown last, in seconds of `time.monotonic`."""

    def __post_init__(self) -> None:
        self.queue = ProcessQueue(self.jobs, self.wanted, self._start, self._ended, self._watch)
        self._look()

    def work(self) -> bool:
        """Make the runs, and show the results; return whether none was interrupted."""
        if any(run.key not in self.results for run in self.runs):
            self.folder.best.unlink(missing_ok=True)  # it may not be the best of all runs
        finished = True
        try:
            with self._showing():
                self.queue.work()
        except KeyboardInterrupt:
            finished = False
        self._look()
        self._report(finished)
        return finished

    def wanted(self) -> dict[str, GridRun]:
        """Return the runs that have neither a result nor failed."""
        done = self.results.keys() | self.failures.keys()
        return {run.key: run for run in self.runs if run.key in self.keys and run.key not in done}

    def _look(self) -> None:
        """Read the results of the runs that have none yet."""
        for run in self.runs:
            if run.key not in self.results:
                result = result_of(self.folder.run_dir(run), run.config, self.weights)
                if result is not None:
                    self.results[run.key] = result

    def _start(self, run: GridRun, place: int) -> BaseProcess:
        words = ["train", str(self.folder.toml(run)), "--run-dir", str(self.folder.run_dir(run))]
        words += ["--nproc", str(self.nproc)] if self.nproc > 1 else []
        words += ["--data.path", *self.data_paths[run.key]]
        variables = environment(place, self.jobs, self.nproc, run.config.train.device)
        process = multiprocessing.get_context("spawn").Process(
            target=run_command, args=(words, self.folder.log(run), variables), name=run.key
        )
        process.start()
        return process

    def _ended(self, run: GridRun, code: int | None) -> None:
        result = result_of(self.folder.run_dir(run), run.config, self.weights)
        if result is None:
            self.failures[run.key] = self._reason(run, code)
            self._say(f"{run.text}: {self.failures[run.key]}")
        else:
            self.results[run.key] = result
            left = len(self.wanted())
            loss = "diverged" if result.why else f"{LOSSES[self.weights]} {result.loss:.4f}"
            self._say(f"{run.text}: {loss} ({left} {'run' if left == 1 else 'runs'} left)")

    def _reason(self, run: GridRun, code: int | None) -> str:
        """Say why a run has ended without a result."""
        log = self.folder.log(run)
        if code == 0:
            step = last_step(self.folder.run_dir(run))
            return f"stopped at step {step}; the same command goes on"
        if code is not None and code < 0:
            why = f"killed by {signal.Signals(-code).name}"
        else:
            lines = read_text(log, "replace").split("\n") if log.exists() else []
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            why = last.strip().removeprefix("lather: ").removeprefix("error: ")
        return f"failed: {why} ({log})"

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    @contextlib.contextmanager
    def _showing(self) -> Iterator[None]:
        """Show the table on a terminal, where it is replaced by the next."""
        if not (is_live(self.console) and self.wanted()):
            yield
            return
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        with self.live:
            yield
        self.live = None

    def _watch(self) -> None:
        if self.live is not None and time.monotonic() > self.shown + SHOWN_SECONDS:
            self.shown = time.monotonic()
            self.live.update(self.table(), refresh=True)

    def table(self) -> FittedTable:
        """Return a table of the rows, the best first."""
        rows = rows_of(self.runs, self.results)
        names = short_names(rows[0].values)
        table = titled_table("", names.values(), (LOSSES[self.weights], "seeds"))
        table.add_column("state")
        for row in rows:
            loss = "" if row.mean is None else row.mean.text(4)
            if row.mean is not None and row.mean.finite < row.mean.count:
                loss = "diverged"
            seeds = f"{len(row.results)}/{len(row.runs)}"
            table.add_row(*row.values.values(), loss, seeds, self._state(row))
        return table

    def _state(self, row: SweepRow) -> str:
        running = [run for run in row.runs if run.key in self.queue.running]
        failed = [run for run in row.runs if run.key in self.failures]
        if running:
            steps = sum(last_step(self.folder.run_dir(run)) for run in running)
            return f"{100 * steps // sum(run.config.train.steps for run in running)} %"
        if row.is_complete:
            return "done"
        if failed:
            return self.failures[failed[0].key].partition(" ")[0].rstrip(":")
        return "waiting"

    def _report(self, finished: bool) -> None:
        """Print the results, and write the best configuration and the picture."""
        rows = rows_of(self.runs, self.results)
        self.console.print(self.table())
        for run in self.runs:
            if (result := self.results.get(run.key)) and result.why:
                self._say(f"{run.text}: diverged: {result.why}")
            elif run.key in self.failures:
                self._say(f"{run.text}: {self.failures[run.key]}")
        for note in notes_on(rows, self.weights):
            self._say(note)
        if not finished:
            self._say("stopped; the same command goes on")
        are_complete = all(row.is_complete for row in rows)
        best = best_of(rows) if finished and are_complete else None
        if best is not None:
            self._write_best(best)
        if drawn := [row for row in rows if row.results]:
            self._draw(drawn)
        if best is not None:
            self._say(f"best     lather train {self.folder.best}")

    def _draw(self, rows: Sequence[SweepRow]) -> None:
        from lather.sweep.picture import draw  # matplotlib takes a second to import

        picture = self.folder.path / "sweep.png"
        with optional_file(picture, self._say, end=""):
            draw(rows, picture, LOSSES[self.weights])
            self._say(f"picture  {picture}")

    def _write_best(self, row: SweepRow) -> None:
        values = values_of_config(row.runs[0].config)
        del values["seed"]
        # the default is any other run's, too
        values["run_dir"] = str(self.folder.path / "runs" / folder_name(row.values, "best"))
        assert row.mean is not None
        loss = f"{LOSSES[self.weights]} {row.mean.text(4)}"
        comment = f"# lather sweep: {words_for(row.values)}: {loss}\n"
        write_aside(self.folder.best, comment + tomli_w.dumps(values))


def environment(place: int, jobs: int, nproc: int, device: str) -> dict[str, str]:
    """Return the environment variables of a run in one of `jobs` places: its part of the cores,
    unless the user has set OMP_NUM_THREADS, and its GPUs, in turn."""
    variables = {"OMP_NUM_THREADS": str(max(1, num_cores() // (jobs * nproc)))}
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    if device != "cpu" and 0 < nproc <= len(every) and torch.cuda.device_count():
        chosen = [every[(place * nproc + rank) % len(every)] for rank in range(nproc)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return variables
