"""Makes table, summary and picture of `lather bench memory`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
    """The rows of one part, in order, by contestant (for the loss by contestant and dtype)."""
    chosen = [row for row in rows if row["benchmark"] == benchmark]
    return {
        f"{row['config']['contestant']} {row['config']['dtype']}"
        if benchmark == "loss"
        else row["config"]["contestant"]: row
        for row in chosen
    }


def time_cases(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """The timed rows in order, as {case: {contestant: row}}."""
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
            f"saved: {kept['saved']['bf16_elements_per_token']:,.0f} bf16 elements per token "
            f"(target D + 2 K F = {kept['saved']['bound_elements_per_token']:,})",
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


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw bars of the parts that were measured, side by side."""
    panels: list[tuple[Callable[[Axes, dict[str, Row]], None], dict[str, Row]]] = []
    panels += [(_draw_kept, kept)] if (kept := part(rows, "kept")) else []
    panels += [(_draw_loss, loss)] if (loss := part(rows, "loss")) else []
    panels += [(_draw_time, timed) for timed in time_cases(rows).values()]
    figure = Figure(figsize=(4.4 * len(panels), 3.4), layout="constrained")
    for axes, (draw_panel, found) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        draw_panel(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        axes.invert_yaxis()
    aside = out.with_suffix(".partial.png")
    figure.savefig(aside, dpi=110, format="png")
    os.replace(aside, out)


def _draw_kept(axes: Axes, rows: dict[str, Row]) -> None:
    _bars(
        axes,
        [LABELS[name] for name in rows],
        [row["bytes_per_token"] / 2**10 for row in rows.values()],
        "{:.1f}",
    )
    axes.set(
        xlabel="KiB per token",
        title="Kept for backward by router and experts\n(DeepSeek-V2-Lite sizes, bf16)",
    )


def _draw_loss(axes: Axes, rows: dict[str, Row]) -> None:
    _bars(
        axes,
        [name.replace(" ", "\n") for name in rows],
        [100 * row["share_of_logits"] for row in rows.values()],
        "{:.1f}%",
    )
    axes.set(
        xlabel="% of the logits tensor",
        title="Besides inputs and gradients,\nforward and backward of the loss",
    )


def _draw_time(axes: Axes, rows: dict[str, Row]) -> None:
    _bars(
        axes,
        [LABELS[name] for name in rows],
        [row["times_of_plain"] for row in rows.values()],
        "{:.2f}",
    )
    config = next(iter(rows.values()))["config"]
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(
        xlabel="times of plain autograd",
        title=f"Forward and backward in {config['dtype']},\n{config['case']}",
    )


def _bars(axes: Axes, names: list[str], values: list[float], form: str) -> None:
    colors = [
        "C0" if name.startswith(("saved", "recompute", "linear")) else "0.6" for name in names
    ]
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
    axes.margins(x=0.18)
    axes.tick_params(axis="y", labelsize=8)
