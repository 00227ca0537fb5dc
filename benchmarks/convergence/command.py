"""`lather bench convergence ACTION STUDY`: makes the runs of a study, measures what its optimizers
cost, or reports the results."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from rich.console import Console

from benchmarks.convergence.analysis import Findings
from benchmarks.convergence.queue import Queue, append_row, read_rows
from benchmarks.convergence.study import Study, load_study
from benchmarks.convergence.tables import markdown_table, rates_table
from benchmarks.report import environment
from lather.argument import Argument
from lather.console import command_console
from lather.errors import UserError, require

UNFINISHED = 3
"""Exit status while runs are missing."""
BASELINES = ("adamw", "muon")
"""Contestants that the tables compare all others with."""


@dataclass(frozen=True)
class ConvergenceBenchmark:
    """Finds out which rule learns how fast: the runs of a study, what its optimizers cost, and what
    follows."""

    action: Annotated[Literal["run", "cost", "report"], Argument(positional=True)]
    """run: make the runs that are missing (it goes on after a stop or a kill). cost: measure
    milliseconds and bytes of the study's optimizers, on a machine that does nothing else. report:
    print tables and draw the picture of what is there."""
    study: Annotated[Path, Argument(positional=True)]
    """Study file, such as benchmarks/studies/short.toml; modules beside it can be named as rules
    (module:Class)."""
    out: Path | None = None
    """Folder for rows.jsonl, costs.jsonl, picture and unfinished runs (default:
    runs/convergence/NAME)."""
    workers: int = os.cpu_count() or 1
    """Runs at a time, each on one core."""
    minutes: float = float("inf")
    """Stop after about so long; the same command goes on."""

    def __post_init__(self) -> None:
        require(self.workers >= 1, "--workers", self.workers, "at least 1")
        require(self.minutes > 0, "--minutes", self.minutes, "above 0")


def run(options: ConvergenceBenchmark) -> int:
    """Carry out the action; returns the exit status, `UNFINISHED` if runs are missing after
    `--minutes`."""
    sys.path.insert(0, str(options.study.parent.resolve()))
    study, console = load_study(options.study), command_console()
    folder = options.out or Path("runs/convergence") / study.name
    if options.action == "report":
        return report(study, folder, console)
    common = {**environment(torch.device("cpu"), ()), "study": study.name}
    if options.action == "cost":
        _measure_costs(study, folder, common, console)
        return 0

    def say(text: str) -> None:
        console.print(text, highlight=False)

    done = Queue(study, folder, options.workers, common, say).work(60 * options.minutes)
    report(study, folder, console)
    return 0 if done else UNFINISHED


def load_findings(study: Study, folder: Path) -> Findings:
    """Return the compared rows of a study in a folder, and its newest costs."""
    costs = folder / "costs.jsonl"
    rows = [json.loads(line) for line in costs.read_text().splitlines()] if costs.exists() else []
    newest = {(row["setting"], row["contestant"]): row for row in rows}
    return Findings(study.compared(read_rows(folder / "rows.jsonl")), list(newest.values()))


def report(study: Study, folder: Path, console: Console) -> int:
    """Print tables and draw the picture; returns the exit status."""
    rows = read_rows(folder / "rows.jsonl")
    if not rows:
        raise UserError(
            f"{folder}: no run is finished yet: lather bench convergence run STUDY makes them"
        )
    if study.tuning is not None:
        console.print(rates_table(study, rows), highlight=False, soft_wrap=True, markup=False)
    findings = load_findings(study, folder)
    for setting in findings.settings():
        baselines = [name for name in BASELINES if name in findings.contestants(setting)]
        console.print(
            f"\n{setting}\n{markdown_table(findings, setting, baselines)}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    if findings.rows:
        from benchmarks.convergence.picture import draw  # matplotlib takes a second to import

        names = dict.fromkeys(contestant.name for contestant in study.contestants)
        draw(findings, list(names), folder / "curves.png")
        console.print(
            f"\nrows {folder / 'rows.jsonl'}   picture {folder / 'curves.png'}", highlight=False
        )
    return 0


def _measure_costs(study: Study, folder: Path, common: dict[str, object], console: Console) -> None:
    from benchmarks.convergence.cost import measure

    folder.mkdir(parents=True, exist_ok=True)
    for row in measure(study, folder):
        append_row(folder / "costs.jsonl", {**common, **row})
        ms, bytes_each = row["optimizer_ms"], row["state_bytes"] / row["parameters"]
        console.print(
            f"{row['setting']} {row['contestant']}: {ms['median']:.2f} ms ({ms['p20']:.2f} to "
            f"{ms['p80']:.2f}), gradient "
            f"{row['gradient_ms']['median']:.1f} ms, {bytes_each:.1f} bytes per parameter",
            highlight=False,
            soft_wrap=True,
        )
