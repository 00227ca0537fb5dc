"""Makes table and summary of `lather bench memory`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from benchmarks.report import Row
from lather.console import titled_table

LABELS = {
    "reference": "plain autograd",
    "early_free": "early freeing alone",
    "saved": "saved",
    "recompute": "recompute",
}


def part(rows: Iterable[Row], benchmark: str) -> dict[str, Row]:
    """Return the rows of a part, in order, by contestant (for the loss by contestant and dtype)."""
    chosen = [row for row in rows if row["benchmark"] == benchmark]
    return {
        f"{row['config']['contestant']} {row['config']['dtype']}"
        if benchmark == "loss"
        else row["config"]["contestant"]: row
        for row in chosen
    }


def time_cases(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the timed rows in order, as {case: {contestant: row}}."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["benchmark"] == "time":
            cases.setdefault(row["config"]["case"], {})[row["config"]["contestant"]] = row
    return cases


def print_table(rows: Sequence[Row], console: Console) -> None:
    kept = part(rows, "kept")
    if kept:
        table = titled_table(
            "", ["router and experts"], ("kept, bytes/token", "of plain", "of early freeing")
        )
        for name, row in kept.items():
            shares = (
                row["bytes_per_token"] / kept[base]["bytes_per_token"]
                for base in ("reference", "early_free")
            )
            table.add_row(
                LABELS[name],
                f"{row['bytes_per_token']:,.0f}",
                *(f"{share:.3f}" for share in shares),
            )
        console.print(table)
    for case, timed in time_cases(rows).items():
        table = titled_table("", [case], ("forward + backward, ms", "p20-p80", "times of plain"))
        for name, row in timed.items():
            ms = row["step_ms"]
            table.add_row(
                LABELS[name],
                f"{ms['median']:.0f}",
                f"{ms['p20']:.0f}-{ms['p80']:.0f}",
                f"{row['times_of_plain']:.2f}",
            )
        console.print(table)
    for name, row in part(rows, "loss").items():
        size = (
            f"{row['extra_bytes'] / 2**20:,.1f} MiB besides inputs and "
            f"gradients, {row['share_of_logits']:.1%} of the logits"
        )
        console.print(f"loss, {name}: {size}")


def summary(rows: Sequence[Row]) -> list[str]:
    """Make a line for each target: the goal and what was measured."""
    kept, loss = part(rows, "kept"), part(rows, "loss")
    lines = []
    if kept:
        size = {name: row["bytes_per_token"] for name, row in kept.items()}
        lines += [
            f"saved: {size['saved'] / size['early_free']:.3f} of early freeing alone (target "
            "0.45), "
            f"{size['saved'] / size['reference']:.3f} of plain autograd (target 0.35)",
            f"recompute: {size['recompute'] / size['early_free']:.3f} of early freeing alone "
            "(target 0.15)",
            f"saved: {size['saved']:,.0f} bytes per token, indices included (target D + 2 K F in "
            f"bf16 = {2 * kept['saved']['bound_elements_per_token']:,})",
        ]
    for name, row in loss.items():
        if name.startswith("linear"):
            lines.append(f"{name}: {row['share_of_logits']:.1%} of the logits (target 5%)")
    for case, timed in time_cases(rows).items():
        lines.append(
            f"time of saved, {case}: {timed['saved']['times_of_plain']:.2f} of plain autograd "
            "(target 1.10)"
        )
    return lines
