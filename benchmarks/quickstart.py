"""Trains the quickstart under its own rule and under others at their tuned rates: loss, seconds,
the optimizer's share, memory, a picture.

    python -m benchmarks.quickstart [--only muon adamw] [--seeds 0 1]

Each run is the command that a user would give, on all cores, one after the other: nothing else
should run meanwhile. Rows go to benchmarks/results/quickstart.jsonl, the picture of the first seed
to docs/quickstart.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import environment
from lather.files import read_rows
from lather.train.metrics import training_rows

REPOSITORY = Path(__file__).parents[1]
OWN = "muon"
CONTESTANTS: dict[str, list[str]] = {
    OWN: [],
    "adamw": [
        "--optim.name",
        "adamw",
        "--optim.lr",
        "2e-3",
        "--optim.rest.rule",
        "adamw",
        "--optim.rest.lr-factor",
        "16",
    ],
}
"""Options of `lather train configs/quickstart.toml` for each rule, with the rates that the study
`tune` found for this model."""
WARM_UP = 10
"""The first steps of a run, which medians leave out."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "benchmarks/results/quickstart.jsonl"
    )
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "docs/quickstart.png")
    parser.add_argument("more", nargs="*", help="further options of lather train, after --")
    options = parser.parse_args()
    rows, common = [], environment(torch.device("cpu"), ())
    for seed in options.seeds:
        for name in options.only:
            run_dir = REPOSITORY / f"runs/quickstart-{name}-{seed}"
            # removes a run of another configuration, or a finished one
            shutil.rmtree(run_dir, ignore_errors=True)
            command = [
                sys.executable,
                "-m",
                "lather",
                "train",
                "configs/quickstart.toml",
                "--run-dir",
                str(run_dir),
                "--seed",
                str(seed),
            ]
            subprocess.run(
                [*command, *CONTESTANTS[name], *options.more], cwd=REPOSITORY, check=True
            )
            rows.append(
                {
                    **common,
                    "benchmark": "quickstart",
                    "contestant": name,
                    "seed": seed,
                    **row_of(run_dir),
                }
            )
            print(json.dumps(rows[-1]))
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [str(REPOSITORY / f"runs/quickstart-{name}-{options.seeds[0]}") for name in options.only]
    subprocess.run(
        [sys.executable, "-m", "lather", "plot", *runs, "--out", str(options.picture)],
        cwd=REPOSITORY,
        check=True,
    )


def row_of(run_dir: Path) -> dict[str, Any]:
    """Make the row of a run from its metrics."""
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = list(training_rows(rows))
    timed = steps[WARM_UP:]
    validation = [[row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row]
    return {
        "steps": len(steps),
        "tokens": sum(row["tokens"] for row in steps),
        "first_loss": validation[0][1],
        "loss": validation[-1][1],
        "validation": validation,
        "seconds": steps[-1]["seconds"],
        "optimizer_seconds": sum(row["optimizer_seconds"] for row in steps),
        "step_ms": 1e3 * statistics.median(row["step_seconds"] for row in timed),
        "optimizer_ms": 1e3 * statistics.median(row["optimizer_seconds"] for row in timed),
        "optimizer_share": sum(row["optimizer_seconds"] for row in timed)
        / sum(row["step_seconds"] for row in timed),
        "peak_memory_gb": max(row["peak_memory_bytes"] for row in steps) / 1e9,
    }


if __name__ == "__main__":
    main()
