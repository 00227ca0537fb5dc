"""Measures the time of a step with state in 8 bits beside the same with state in fp32.

    python -m benchmarks.coded_time [--runs 3] [--out benchmarks/results/coded-time.jsonl]

The sets and options are those of `lather bench optimizer`. Both optimizers live in one process and
take turns; a round has whole intervals between refreshes of each. Needs a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.contestants import (
    DEFAULT_SETS,
    OURS,
    SETS,
    Contestant,
    OptimizerCase,
    gradient_pool,
)
from benchmarks.measure import percentiles, run_steps, time_rounds
from benchmarks.report import Row, RowFile, environment

RULES = (("soap", 10), ("muon", 1), ("adamw", 1))
ROUNDS = 7


def rows() -> Iterator[Row]:
    device = torch.device("cpu")
    for rule, frequency in RULES:
        for name in DEFAULT_SETS:
            case = OptimizerCase(rule, SETS[name], frequency)
            pool = gradient_pool(case.matrices, device)
            both = [
                case.contestant(OURS, pool),
                case.contestant(OURS, pool, state_dtype=torch.int8),
            ]
            both[1].name = "int8"
            for contestant in both:
                run_steps(contestant, 1 + frequency)
            _check(both)
            times = time_rounds(both, case.steps_per_round, ROUNDS, device)
            ratios = [b / a for a, b in zip(times[OURS], times["int8"], strict=True)]
            yield {
                "benchmark": "time of state in int8",
                "config": {"rule": rule, "set": name, "frequency": frequency},
                "baseline": "state in fp32",
                "fp32_ms": percentiles(times[OURS]),
                "int8_ms": percentiles(times["int8"]),
                "ratio": percentiles(ratios),
            }


def _check(both: list[Contestant]) -> None:
    """Check that the weights with state in int8 have gone nearly the same way."""
    fp32, int8 = (torch.cat([p.detach().flatten() for p in x.params]) for x in both)
    away = (int8 - fp32).norm() / fp32.norm()
    assert away <= 0.1, f"weights differ by {away:.3f} of their norm"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coded-time.jsonl"))
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    file, common = RowFile(options.out), environment(torch.device("cpu"), ())
    for run in range(1, options.runs + 1):
        for row in rows():
            print(run, *row["config"].values(), f"{row['ratio']['median']:.2f}")
            file.write([{**common, "run": run, **row}])
    file.finish()


if __name__ == "__main__":
    main()
