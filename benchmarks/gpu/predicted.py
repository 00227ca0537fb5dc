"""Finds what the time model predicted for the cases that `make gpu` measures: rows of `lather bench
launches` (`benchmarks.launches.gpu_cases`) beside measured rows.

A prediction belongs to a measured row if it was made for the same device and the same sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

from benchmarks.gpu.parts import ROOT
from benchmarks.report import Row

PREDICTIONS = ROOT / "benchmarks/results/launches.jsonl"
PARTS = {"training": "gpu step", "block": "gpu block", "refresh": "refresh"}
"""The part of the predicted rows, by the benchmark of measured rows."""
NOT_COMPARED = ("part", "row", "model", "frequency")
"""Keys of the configuration of a predicted row that measured rows lack."""
OPTIMIZER = "lather.optim."
"""The phases of an optimizer's step begin so."""


@cache
def predictions() -> tuple[Row, ...]:
    """Read the predicted rows of the repository."""
    if not PREDICTIONS.exists():
        return ()
    return tuple(json.loads(line) for line in PREDICTIONS.read_text().splitlines())


def step_ms(row: Row, gpu: str) -> float:
    """Return the milliseconds of all work of a predicted row on a device."""
    return float(row["of_devices_ms"][gpu])


def optimizer_ms(row: Row, gpu: str) -> float:
    """Return the milliseconds of the optimizer's phases in a predicted row."""
    return sum(
        counts["of_devices_ms"].get(gpu, 0.0)
        for phase, counts in row["phases"].items()
        if phase.startswith(OPTIMIZER)
    )


def predicted(
    measured: Row, rows: Sequence[Row], value: Callable[[Row, str], float] = step_ms
) -> float | None:
    """Return a value of the predicted rows that belong to a measured row: its mean over the steps
    from one refresh to the next, if there are refreshes; None if nothing was predicted."""
    values = {row["config"]["row"]: row for row in rows if _belongs(row, measured)}
    if not values:
        return None
    last, gpu = list(values.values())[-1], measured["hardware"]["gpu"]
    if "refresh" not in values:
        return value(last, gpu)
    between = value(values["between refreshes"], gpu)
    return between + (value(values["refresh"], gpu) - between) / last["config"]["frequency"]


def measured_ms(row: Row) -> float:
    """Return the milliseconds of a measured step, block or refresh."""
    if row["benchmark"] == "training":
        return 1e3 * float(row["step_seconds"])
    ms = row["ms"]
    return float(ms["lather"]["median"] if row["benchmark"] == "refresh" else ms["median"])


def beside(row: Row) -> str:
    """Say in brackets what was predicted for a measured row; an empty text if nothing was."""
    ms = predicted(row, predictions())
    return "" if ms is None else f" (predicted {ms:.1f})"


def _belongs(row: Row, measured: Row) -> bool:
    config = measured["config"]
    sizes = {**config, **config.get("model", {})}
    return (
        row["config"]["part"] == PARTS.get(measured["benchmark"])
        and measured["hardware"]["gpu"] in row["of_devices_ms"]
        and all(
            sizes.get(key) == value
            for key, value in row["config"].items()
            if key not in NOT_COMPARED
        )
    )
