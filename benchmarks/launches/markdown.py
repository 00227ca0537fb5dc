"""Tables of the time model for the pages: its rates, what it predicts, and what a GPU took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.gpu.predicted import PARTS, measured_ms, optimizer_ms, predicted
from benchmarks.report import Row
from lather.time_model.rates import H100

PREDICTED = ("block", "loss", *PARTS.values())
"""Parts of the rows that the table of predictions shows."""
SHOWN_KINDS = 4
"""Kinds of kernels that it names, those that take longest."""


def rates_table() -> str:
    """Make the table of rates."""
    lines = [["kind of kernel", "TB/s", "Tflop/s", "source"]]
    for kind, rate in H100.kinds.items():
        flops = "" if math.isinf(rate.flops) else f"{rate.flops / 1e12:.4g}"
        lines.append([kind, f"{rate.bytes / 1e12:.3g}", flops, rate.source])
    return _table(lines)


def predictions_table(rows: Sequence[Row]) -> str:
    """Make the table of the times that are predicted for rows of `lather bench launches`."""
    lines = [["case", "launches", "GB", "predicted, ms", "MFU", "most of it, ms"]]
    for row in rows:
        if row["config"]["part"] not in PREDICTED:
            continue
        total = row["total"]
        most = list(total["predicted_ms"].items())[:SHOWN_KINDS]
        lines.append(
            [
                row["case"],
                f"{total['launches']:,}",
                f"{(total['bytes_read'] + total['bytes_written']) / 1e9:,.1f}",
                f"{row['predicted_ms']:,.1f}",
                "" if row["mfu"] is None else f"{row['mfu']:.0%}",
                ", ".join(f"{kind} {ms:,.1f}" for kind, ms in most),
            ]
        )
    return _table(lines)


def measured_table(rows: Sequence[Row], measured: Sequence[Row]) -> str:
    """Make the table of predictions beside the measured rows to which they belong."""
    lines = [["device", "", "predicted, ms", "measured, ms", "predicted / measured"]]
    for row in measured:
        device = row["hardware"]["gpu"].split(" ")[1]
        for name, expected, actual in _pairs(rows, row):
            numbers = (f"{expected:.1f}", f"{actual:.1f}", f"{expected / actual:.2f}")
            lines.append([device, name, *numbers])
    return _table(lines)


def _pairs(rows: Sequence[Row], measured: Row) -> Iterator[tuple[str, float, float]]:
    """Yield name, predicted and measured milliseconds of what a measured row says."""
    expected, config = predicted(measured, rows), measured["config"]
    if expected is None:
        return
    name = {
        "training": "a step of the 1.7 B model, {optimizer}",
        "block": "a block, {contestant}",
        "refresh": "a refresh of 96 factors, {hidden} / {mlp}",
    }[measured["benchmark"]].format(**config)
    if config.get("cuda_graph"):
        name += ", its passes a CUDA graph"
    yield name, expected, measured_ms(measured)
    of_optimizer = predicted(measured, rows, optimizer_ms)
    if of_optimizer and measured["benchmark"] == "training":
        yield "of it the optimizer", of_optimizer, 1e3 * measured["optimizer_seconds"]


def _table(lines: Sequence[Sequence[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in ruled)
