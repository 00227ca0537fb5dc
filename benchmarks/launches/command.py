"""`lather bench launches`: counts all cases, writes a row for each, and prints the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.launches.cases import (
    PUBLISHED,
    LaunchCase,
    block_case,
    loss_case,
    optimizer_case,
    step_case,
)
from benchmarks.launches.counter import CountedPhase, Counter
from benchmarks.report import Row, RowFile, environment
from lather.console import FittedTable, command_console, titled_table
from lather.errors import require

CONTEXT_RANKS = 8
"""Number of ranks among which the sequence of a block is divided, if it is divided."""
GIB = 2**30


@dataclass(frozen=True)
class LaunchesBenchmark:
    """Counts kernel launches, bytes, flops and host waits of a GPU, without one. No time follows
    from a count."""

    parts: tuple[Literal["optimizer", "block", "loss", "step"], ...] = (
        "optimizer",
        "block",
        "loss",
        "step",
    )
    """Parts to count."""
    models: tuple[str, ...] = tuple(PUBLISHED)
    """Models whose sizes are used: DeepSeek-V2-Lite and Qwen3-30B-A3B."""
    rules: tuple[str, ...] = ("soap", "klsoap", "soap_muon", "muon")
    """Rules of the optimizer. All but the first are counted only for the first model on the most
    ranks."""
    ranks: tuple[int, ...] = (8, 16)
    """Numbers of ranks; the optimizer's step of one of them is counted."""
    layers: int = 0
    """How many layers the optimizer's models have, for a quick look; 0: all."""
    out: Path = Path("benchmarks/results")
    """Folder for launches.jsonl; a run replaces it."""

    def __post_init__(self) -> None:
        require(
            all(model in PUBLISHED for model in self.models),
            "--models",
            self.models,
            f"some of {', '.join(PUBLISHED)}",
        )
        require(all(ranks >= 1 for ranks in self.ranks), "--ranks", self.ranks, "at least 1 each")
        require(self.layers >= 0, "--layers", self.layers, "at least 0")


def cases(options: LaunchesBenchmark) -> Iterator[LaunchCase]:
    """All cases that the options ask for."""
    layers = options.layers or None
    if "optimizer" in options.parts:
        for number, rule in enumerate(options.rules):
            for model in options.models[: 1 if number else None]:
                for ranks in options.ranks[-1:] if number else options.ranks:
                    yield optimizer_case(rule, model, ranks, layers)
    for model in options.models if "block" in options.parts else ():
        yield block_case(model)
        yield block_case(model, context_ranks=CONTEXT_RANKS)
    if "loss" in options.parts:
        yield loss_case()
    for model in options.models[:1] if "step" in options.parts else ():
        yield step_case(model)


def run(options: LaunchesBenchmark) -> int:
    """Count all cases; returns the exit status."""
    file, common = RowFile(options.out / "launches.jsonl"), environment(torch.device("cpu"), ())
    console = command_console()
    found = []
    for case in cases(options):
        for row in count(case):
            found.append({**common, "benchmark": "launches", **row})
            file.write(found[-1:])
            console.print(f"{row['case']}: {row['total']['launches']:,} launches", highlight=False)
    file.finish()
    console.print(table(found))
    console.print(f"rows {file.path}", highlight=False)
    return 0


def count(case: LaunchCase) -> Iterator[Row]:
    """Count a case; returns its rows."""
    with Counter() as counter:
        for name in case.rows(counter):
            yield {
                "case": f"{case.name}: {name}",
                "config": {**case.config, "row": name},
                "total": _as_row(counter.total),
                "phases": {phase: _as_row(counts) for phase, counts in counter.phases.items()},
                "waits": [
                    {"what": what, "where": where, "times": times}
                    for (what, where), times in counter.waits.most_common()
                ],
                "notes": dict(counter.notes.most_common()),
            }


def _as_row(phase: CountedPhase) -> Row:
    return {**asdict(phase), "kernels": dict(phase.kernels.most_common(8))}


def table(rows: list[Row]) -> FittedTable:
    """Make a table with a line for each phase of each row, and one for all phases."""
    numbers = (
        "launches",
        "triton",
        "views",
        "GiB read",
        "GiB written",
        "TFLOP",
        "host waits",
        "peak GiB",
    )
    out = titled_table("", ("case", "phase"), numbers)
    for row in rows:
        for phase, counts in [*row["phases"].items(), ("all", row["total"])]:
            sizes = [f"{counts[name] / GIB:.2f}" for name in ("bytes_read", "bytes_written")]
            counted = [f"{counts[name]:,}" for name in ("launches", "triton", "views")]
            last = (
                f"{counts['flops'] / 1e12:.2f}",
                str(counts["host_waits"]),
                f"{counts['peak_bytes'] / GIB:.2f}",
            )
            out.add_row(
                row["case"] if phase == "all" else "",
                phase.removeprefix("lather."),
                *counted,
                *sizes,
                *last,
            )
        out.add_section()
    return out
