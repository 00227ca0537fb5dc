"""`lather report RUN [--out FILE]`: the page of a run, which may still be training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lather.argument import Argument
from lather.commands.parsing import parse_arguments
from lather.config.run_folder import check_format, run_folder
from lather.errors import UserError


@dataclass(frozen=True)
class ReportArguments:
    """Write a page of a run, one file of HTML: curves, experts' loads, memory, schedule, sample,
    changes, versions, configuration."""

    run: Annotated[Path, Argument(positional=True)]
    """Run directory."""
    out: Path | None = None
    """File to write; left out: report.html in the run's folder."""


def report_command(arguments: list[str]) -> None:
    """Write the page and print where it is."""
    parsed = parse_arguments(ReportArguments, "lather report", arguments)
    run = run_folder(parsed.run)
    if not any((run / name).is_file() for name in ("metrics.jsonl", "config.toml")):
        raise UserError(
            f"{run}: not a run (it has no metrics.jsonl): give the run_dir of a training run"
        )
    check_format(run)

    from lather.train.report import REPORT, write_report  # matplotlib takes a second to import

    out = parsed.out or run / REPORT
    for note in write_report(run, out):
        print(f"note: {note}", file=sys.stderr)
    print(out)
