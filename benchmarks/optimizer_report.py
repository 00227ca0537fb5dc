"""Makes a table and a summary against the targets, from the rows of `lather bench optimizer`.

A benchmark of several runs has as many rows per case and contestant; it shows their median and
their range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from benchmarks.contestants import OURS, MatrixSet, OptimizerCase
from benchmarks.report import Row
from lather.console import titled_table

Cases = dict[str, dict[str, list[Row]]]
"""The rows of steps by case and contestant, in the order of runs."""
TARGET_MEAN, TARGET_LEAST = 1.5, 1.1


@dataclass(frozen=True)
class RunRange:
    """The median, the least and the most of several runs' numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RunRange:
        return cls(float(np.median(values)), min(values), max(values))

    def text(self, digits: int) -> str:
        shown = [f"{x:,.{digits}f}" for x in (self.median, self.least, self.most)]
        return shown[0] if self.least == self.most else f"{shown[0]} ({shown[1]} - {shown[2]})"


def case_name(row: Row) -> str:
    config = row["config"]
    return str(
        OptimizerCase(
            config["rule"],
            MatrixSet(config["set"], config["num_matrices"], tuple(config["shape"])),
            config["frequency"],
        )
    )


def ratio(row: Row, ours: Row) -> float:
    """Return a contestant's time relative to ours: the median of the rounds' ratios, because
    neighbors in time share the machine's noise."""
    return float(np.median(np.divide(row["round_ms"], ours["round_ms"])))


def by_case(rows: Iterable[Row]) -> Cases:
    cases: Cases = {}
    for row in rows:
        if row["benchmark"] == "optimizer":
            cases.setdefault(case_name(row), {}).setdefault(row["config"]["contestant"], []).append(
                row
            )
    return cases


def ratios(case: Mapping[str, list[Row]], name: str) -> list[float]:
    """Return a contestant's time relative to ours, run by run."""
    return [ratio(row, ours) for row, ours in zip(case[name], case[OURS], strict=True)]


def milliseconds(rows: Sequence[Row]) -> RunRange:
    return RunRange.of([row["step_ms"]["median"] for row in rows])


def peers_of(cases: Cases) -> list[tuple[str, str]]:
    """Return the pairs of a rule and another library that implements it."""
    return list(
        dict.fromkeys(
            (case.split()[0], name) for case, rows in cases.items() for name in rows if name != OURS
        )
    )


def geometric_mean(cases: Cases, rule: str, peer: str) -> RunRange:
    """Return a peer's time relative to ours, as the geometric mean over all cases of a rule, run by
    run."""
    return RunRange.of([float(np.exp(np.mean(np.log(run)))) for run in _runs(cases, rule, peer)])


def least(cases: Cases, rule: str, peer: str) -> RunRange:
    """Return a peer's time relative to ours in the case in which it does best, run by run."""
    return RunRange.of([float(min(run)) for run in _runs(cases, rule, peer)])


def _runs(cases: Cases, rule: str, peer: str) -> list[tuple[float, ...]]:
    """Return the ratios of each run, case by case."""
    of_cases = [
        ratios(rows, peer)
        for case, rows in cases.items()
        if case.split()[0] == rule and peer in rows
    ]
    return list(zip(*of_cases, strict=True))


def table_rows(cases: Cases) -> list[list[str]]:
    """Make a line for each case and contestant, with the cells of `HEAD`."""
    return [
        [
            case,
            name,
            milliseconds(rows).text(2),
            "" if name == OURS else RunRange.of(ratios(contestants, name)).text(2),
            f"{rows[0]['state_bytes'] / 2**20:.1f}",
            f"{rows[0]['peak_temporary_bytes'] / 2**20:.1f}",
        ]
        for case, contestants in cases.items()
        for name, rows in contestants.items()
    ]


HEAD = ("case", "optimizer", "ms per step", "of ours", "state, MiB", "temporary")


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = titled_table("", HEAD[:2], HEAD[2:])
    for line in table_rows(by_case(rows)):
        table.add_row(*line)
    console.print(table)


def summary(rows: Sequence[Row]) -> list[str]:
    """Make a line for each target: the goal and what was measured."""
    cases = by_case(rows)
    lines = [
        f"{rule} against {peer}: takes {geometric_mean(cases, rule, peer).text(2)} times as long "
        f"(geometric mean; target {TARGET_MEAN}), "
        f"in the closest case {least(cases, rule, peer).text(2)} times (target {TARGET_LEAST})"
        for rule, peer in peers_of(cases)
    ]
    shares = {
        name: case[OURS][0]["state_bytes"] / case[OURS][0]["state_bound_bytes"]
        for name, case in cases.items()
    }
    if shares:
        worst = max(shares, key=lambda name: shares[name])
        lines.append(
            f"state: at most {shares[worst]:.1%} of what the rule's tensors take, {worst} (target "
            "100%)"
        )
    return lines
