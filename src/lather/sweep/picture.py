"""Draws the results of a sweep: validation losses, with intervals, over the number that has most
values, a line for each combination of the others; without a number, a point for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lather.files import whole_file
from lather.sweep.grid import short_names
from lather.sweep.results import SweepRow, number_of

COLORS = 10
LINES = ("-", "--", ":", "-.")
LOGARITHMIC = 3.0
"""Ratio of the greatest to the least number from which on their axis is logarithmic."""


def draw(rows: Sequence[SweepRow], out: Path, loss: str) -> None:
    """Draw the rows that have results. `loss`: the name of theirs. Raises UserError if `out` cannot
    be written."""
    over, label_of_loss = _axis(rows), f"{loss} (nats per token)"
    lines: dict[str, list[SweepRow]] = {}
    for row in rows:
        lines.setdefault(_label(row, over), []).append(row)
    height = 4.5 if over else 1.5 + 0.3 * len(rows)
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    if over is None:
        for place, row in enumerate(rows):
            _draw_points(axes, [row], [place], {"color": f"C{place % COLORS}"}, is_across=True)
        axes.set(xlabel=label_of_loss, yticks=range(len(rows)), yticklabels=list(lines))
        axes.set_ylim(len(rows) - 0.5, -0.5)
    else:
        for index, (label, each) in enumerate(sorted(lines.items())):
            each.sort(key=lambda row: number_of(row, over) or 0.0)
            numbers = [number_of(row, over) or 0.0 for row in each]
            style = {"color": f"C{index % COLORS}", "ls": LINES[index // COLORS % len(LINES)]}
            _draw_points(axes, each, numbers, {**style, "label": label})
        _set_numbers(axes, rows, over)
        axes.set(xlabel=over, ylabel=label_of_loss)
        if len(lines) > 1:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    most = max(len(row.results) for row in rows)
    title = f"means of up to {most} seeds, with intervals of 95 %" if most > 1 else "one seed"
    title += "; crosses: diverged" * any(math.isinf(row.place[0]) for row in rows)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with whole_file(out, "--out") as aside:
        figure.savefig(aside, dpi=110, format="png")


def _axis(rows: Sequence[SweepRow]) -> str | None:
    """Return the field of the horizontal axis: of those whose values are all numbers, the one that
    has most; None if no field has two."""
    values = {
        name: {row.values[name] for row in rows}
        for name in rows[0].values
        if all(number_of(row, name) is not None for row in rows)
    }
    name = max(values, key=lambda name: len(values[name]), default=None)
    return name if name is not None and len(values[name]) > 1 else None


def _label(row: SweepRow, over: str | None) -> str:
    names = short_names(row.values)
    parts = [f"{names[name]} {row.values[name]}" for name in row.values if name != over]
    return ", ".join(parts).replace("$", r"\$") or "all"


def _draw_points(
    axes: Axes,
    rows: Sequence[SweepRow],
    places: Sequence[float],
    style: dict[str, Any],
    *,
    is_across: bool = False,
) -> None:
    """Draw means with intervals at these places, joined by a line, and a cross at the edge for a
    row that diverged. `is_across`: losses are on the horizontal axis."""
    means = [row.mean for row in rows]
    drawn = [
        (place, mean.value, 0.0 if math.isnan(mean.half_width) else mean.half_width)
        for place, mean in zip(places, means, strict=True)
        if mean is not None and math.isfinite(mean.value)
    ]
    x, y, half_widths = zip(*drawn, strict=True) if drawn else ((), (), ())
    if is_across:
        x, y = y, x
    bars: dict[str, Any] = {"xerr" if is_across else "yerr": half_widths}
    axes.errorbar(x, y, **bars, marker="o", markersize=5, capsize=3, elinewidth=1, **style)
    for place, mean in zip(places, means, strict=True):
        if mean is not None and math.isinf(mean.value):
            transform = axes.get_yaxis_transform() if is_across else axes.get_xaxis_transform()
            point = (0.98, place) if is_across else (place, 0.98)
            axes.plot(*point, "x", color=style["color"], transform=transform, clip_on=False)


def _set_numbers(axes: Axes, rows: Sequence[SweepRow], over: str) -> None:
    """Write the numbers of the field `over` at the axis, which is logarithmic if they are far
    apart."""
    written = {number_of(row, over) or 0.0: row.values[over] for row in rows}
    numbers = sorted(written)
    if numbers[0] > 0 and numbers[-1] >= LOGARITHMIC * numbers[0]:
        axes.set_xscale("log")
    axes.set_xticks(numbers, [written[number] for number in numbers])
    axes.set_xticks([], minor=True)
