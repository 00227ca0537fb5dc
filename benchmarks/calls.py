"""`lather bench calls`: counts the calls of the package's Python functions in an optimizer
step: the length of the path from `.grad` to the changed weight, which counts in a step of small
matrices. `sys.setprofile` counts them, so the numbers do not depend on the machine.

A case is a step after `WARM_UP` others, so that state and plan are there. It uses public names
alone, so it can also count earlier releases.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import lather
from benchmarks.report import Row, RowFile, environment
from lather.console import command_console, titled_table
from lather.optim import SOAP

PACKAGE = f"{Path(lather.__file__).parent}{os.sep}"
"""Folder of the package. A checkout, with torch in its .venv, may be called lather, too."""

FREQUENCY = 10
WARM_UP = 13
"""Steps before the counted step, which does not refresh."""


@dataclass(frozen=True)
class CallsBenchmark:
    """Counts Python calls of an optimizer step, and the files that they are in."""

    out: Path = Path("benchmarks/results")
    """Folder for calls.jsonl; a run replaces it."""


@dataclass(frozen=True)
class CallCase:
    """An optimizer whose step is counted."""

    name: str
    shape: tuple[int, ...]
    num_params: int
    refreshes: bool = False
    max_calls: int | None = None
    max_files: int | None = None


CASES = (
    CallCase("SOAP, a matrix", (32, 48), 1, max_calls=160, max_files=13),
    CallCase("SOAP, a matrix, with a refresh", (32, 48), 1, refreshes=True),
    CallCase("SOAP, 100 matrices", (32, 48), 100, max_calls=400),
    CallCase("SOAP, 100 matrices, with a refresh", (32, 48), 100, refreshes=True),
    CallCase("AdamW, 100 vectors", (48,), 100, max_calls=100),
)


def run(options: CallsBenchmark) -> int:
    """Count all cases; returns the exit status, 1 if any is above its bound."""
    file, common = RowFile(options.out / "calls.jsonl"), environment(torch.device("cpu"), ())
    table = titled_table("", ["step"], ("calls", "functions", "files", "at most"))
    too_many = False
    for case in CASES:
        counts = count(case)
        file.write([{**common, "benchmark": "calls", "config": vars(case), **counts}])
        too_many |= counts["calls"] > (case.max_calls or counts["calls"]) or counts["files"] > (
            case.max_files or counts["files"]
        )
        bound = " in ".join(
            f"{most} {what}"
            for most, what in ((case.max_calls, "calls"), (case.max_files, "files"))
            if most
        )
        table.add_row(
            case.name, *[str(counts[key]) for key in ("calls", "functions", "files")], bound
        )
    file.finish()
    console = command_console()
    console.print(table)
    console.print(f"rows {file.path}", highlight=False)
    return int(too_many)


def count(case: CallCase) -> Row:
    """Count calls, functions and files of a step of the case."""
    params = [nn.Parameter(torch.randn(case.shape)) for _ in range(case.num_params)]
    rule = "soap" if len(case.shape) > 1 else "adamw"
    optimizer = SOAP([{"params": params, "rule": rule}], precondition_frequency=FREQUENCY)
    for _ in range(WARM_UP + (FREQUENCY - WARM_UP % FREQUENCY - 1) * case.refreshes):
        _give_gradients(params)
        optimizer.step()
    _give_gradients(params)
    calls = counted(optimizer.step)
    return {
        "calls": sum(calls.values()),
        "functions": len(calls),
        "files": len({file for file, _ in calls}),
    }


def counted(work: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Count how often each of the package's functions is called, by (file, name). Each start of a
    comprehension or generator counts."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            calls[path.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def _give_gradients(params: list[nn.Parameter]) -> None:
    for p in params:
        p.grad = torch.randn_like(p)


if __name__ == "__main__":
    raise SystemExit(run(CallsBenchmark(Path(sys.argv[1]))))
