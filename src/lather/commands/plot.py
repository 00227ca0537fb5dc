"""`lather plot RUN [RUN ...]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from lather.commands.parsing import parse_arguments
from lather.errors import UserError


@dataclass(frozen=True)
class PlotArguments:
    """Draw one picture of one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = field()
    """Run directories."""
    out: Path | None = None
    """File to write, PNG; left out: loss.png of a single run, comparison.png here for several."""


def plot_command(arguments: list[str]) -> int:
    """Draw the picture and print where it is."""
    parsed = parse_arguments(PlotArguments, "lather plot", arguments)
    if not parsed.runs:
        raise UserError("lather plot needs at least one run: lather plot runs/quickstart")
    for run in parsed.runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run}: not a run (it has no metrics.jsonl): give the run_dir of a training run")

    from lather.train.plot import draw  # matplotlib takes a second to import

    out = parsed.out or (parsed.runs[0] / "loss.png" if len(parsed.runs) == 1 else Path("comparison.png"))
    draw(parsed.runs, out)
    print(out)
    return 0
