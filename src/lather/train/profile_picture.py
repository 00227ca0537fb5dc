"""Draws where the time of a step went: for each rank a bar by phase of the step, and one by kind of
operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lather.files import whole_file
from lather.train.step_times import (
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    HOST,
    IDLE,
    KINDS,
    OTHER,
    PHASES,
    StepTimes,
)

PHASE_COLORS = (
    *("#c9b458", "#2f6db3", "#3a8f54", "#e08a2e", "#7fc7c9", "#3f9a9c", "#333333", "#c0392b"),
    *("#f2a6a0", "#e6d9c6", "#8e6bbf", "#b39ddb", "#bdbdbd"),
)
KIND_COLORS = {
    COMMUNICATION: "#7fc7c9",
    "attention": "#e08a2e",
    "matrix products": "#2f6db3",
    "decompositions": "#8e6bbf",
    "indexing, sorting": "#c9b458",
    COPIES: "#333333",
    ELEMENTWISE: "#3a8f54",
    HOST: "#bdbdbd",
}
IDLE_COLOR = "#f3f3f3"
ORDER = (
    *("matrix products", "attention", ELEMENTWISE, "indexing, sorting", "decompositions", COPIES),
    *(COMMUNICATION, HOST, IDLE),
)
"""Kinds of operations from the left to the right."""
DARK = {"#2f6db3", "#3a8f54", "#333333", "#c0392b", "#8e6bbf", "#3f9a9c"}
"""Colors that need white numbers."""
NARROW = 0.05
"""Share of a bar below which a piece has no number in it."""
LEAST = 0.001
"""Share of all bars below which a name is left out of the legend."""
MAX_HEIGHT = 36.0
DPI = 110


def colors_of_phases() -> dict[str, str]:
    """Return the phases from the left to the right, with their colors."""
    phases = [*dict.fromkeys(PHASES.values())]
    return {**dict(zip(phases, PHASE_COLORS, strict=False)), OTHER: "#bdbdbd", IDLE: IDLE_COLOR}


def colors_of_kinds() -> dict[str, str]:
    return {name: KIND_COLORS.get(name, IDLE_COLOR) for name in ORDER}


def draw_step_times(ranks: Sequence[StepTimes], path: Path, title: str) -> None:
    """Write a PNG of the times of all ranks. Raises UserError if it cannot be written."""
    assert set(KINDS) <= set(ORDER)
    height = min(2.8 + 0.84 * len(ranks), MAX_HEIGHT)
    figure = Figure(figsize=(12.0, height), dpi=DPI, layout="constrained")
    subfigures: Any = figure.subfigures(2, 1)
    above, below = subfigures
    unit, scale = ("s", 1.0) if max(times.seconds for times in ranks) >= 1 else ("ms", 1e-3)
    phases, kinds = [times.by_phase for times in ranks], [times.by_kind for times in ranks]
    for part, bars, colors in (
        (above, phases, colors_of_phases()),
        (below, kinds, colors_of_kinds()),
    ):
        axes = part.subplots()
        _draw_bars(axes, bars, colors, scale)
        by = "phase" if part is above else "kind of operation"
        axes.set_title(f"{title}: by {by}", loc="left", fontsize=11)
        axes.set_xlabel(f"time of a step ({unit})", fontsize=9)
        part.legend(loc="outside lower left", ncols=6, frameon=False, fontsize=8)
    with whole_file(path, "--run-dir") as aside:
        figure.savefig(aside, dpi=DPI, format="png")


def shares(bars: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Return the share of each name in the time of all bars, in this order; names without time are
    left out."""
    total = sum(sum(bar.values()) for bar in bars)
    sums = {name: sum(bar.get(name, 0.0) for bar in bars) for name in names}
    return {name: time / total for name, time in sums.items() if time > 0}


def _draw_bars(
    axes: Axes, bars: Sequence[Mapping[str, float]], colors: Mapping[str, str], scale: float
) -> None:
    of_all = shares(bars, colors)
    lanes = range(len(bars))
    lefts = [0.0] * len(bars)
    for name, share in of_all.items():
        widths = [bar.get(name, 0.0) / scale for bar in bars]
        label = f"{name} {share:.1%}" if share >= LEAST else "_"
        look: dict[str, Any] = {
            "color": colors[name],
            "edgecolor": "white",
            "linewidth": 0.5,
            "label": label,
        }
        axes.barh(lanes, widths, 0.8, lefts, **look)
        for lane, (left, width, bar) in enumerate(zip(lefts, widths, bars, strict=True)):
            part = bar.get(name, 0.0) / sum(bar.values())
            if part >= NARROW:
                look = {"color": "white" if colors[name] in DARK else "0.15", "fontsize": 8}
                middle = left + width / 2, lane
                axes.text(*middle, f"{part:.0%}", ha="center", va="center", **look)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(lanes, [f"rank {rank}" for rank in lanes])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, max(lefts))
    axes.tick_params(axis="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
