"""Draws a memory plan: the peaks of all pipeline ranks as bars, and each rank's bytes during its
largest step, stacked by kind, with a strip of the rank's actions below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lather.files import whole_file
from lather.memory.dry_run import RankRun
from lather.memory.ledger import KINDS, MemoryTimeline
from lather.memory.plan import MemoryPlan
from lather.memory.plan_report import layers_of, unit_of
from lather.pipeline import picture
from lather.pipeline.schedule import COMPUTE, Action

_HUES = (
    "0.35",
    "#332288",
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ddddaa",
    "#ee6677",
    "#aa3377",
    "#88aa99",
    "0.78",
)
COLORS = dict(zip(KINDS, _HUES, strict=True))
"""A color for each kind, distinguishable with any color vision."""
STRIP = 0.07
"""Height of the strip as a fraction of the panel's."""


@dataclass(frozen=True)
class StripBar:
    """A bar of the strip: an action or phase of a rank, with its interval of a timeline."""

    start: int
    stop: int
    name: str
    """Name in the timeline, for example "3B2"."""
    colors: tuple[str, ...]
    """The bar's color; those of an overlapped pair, the forward chunk's first."""


def strip_bars(timeline: MemoryTimeline) -> Iterator[StripBar]:
    """Yield the schedule's actions, in the colors of `lather plot --schedule`, and the optimizer's
    phases."""
    actions = {mark.name: _action(mark.name) for mark in timeline.marks}
    chunks = [chunk for action in actions.values() if action for chunk in action.chunks]
    first_stage = min((chunk.stage for chunk in chunks), default=0)
    for name, group in groupby(timeline.spans(), key=lambda span: span[0]):
        spans = list(group)
        start, stop = spans[0][1], spans[-1][2]
        action = actions[name]
        if action is not None:
            colors = tuple(
                picture.COLORS[chunk.kind][chunk.stage > first_stage] for chunk in action.chunks
            )
        else:
            colors = (picture.REFRESH,) if name.startswith("optimizer") else ()
        if colors and start < stop:
            yield StripBar(start, stop, name, colors)


def _action(name: str) -> Action | None:
    """Parse the name of a computation; return None for any other name."""
    try:
        action = Action.from_text(name)
    except ValueError:
        return None
    return action if action.kind in COMPUTE else None


def draw(plan: MemoryPlan, memory: int | None, title: str, out: Path) -> None:
    """Write a PNG of the plan; `memory`, the bytes of a device, is a dashed line. Raises UserError
    if `out` cannot be written."""
    with whole_file(out, "--out") as aside:
        figure_of(plan, memory, title).savefig(aside, dpi=110, format="png")


def figure_of(plan: MemoryPlan, memory: int | None, title: str) -> Figure:
    """Return the figure: a panel of bars, and a panel for each pipeline rank."""
    ranks = len(plan.ranks)
    bars = 0.5 + 0.32 * ranks
    figure = Figure(figsize=(11, 1.4 + bars + 2.6 * ranks), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    highest = max(plan.largest.peak, memory or 0)
    unit, scale = unit_of(highest)
    panels = figure.subplots(1 + ranks, 1, height_ratios=[bars, *[2.6] * ranks])
    _draw_bars(panels[0], plan, unit, scale)
    for panel, run in zip(panels[1:], plan.ranks, strict=True):
        _draw_rank(panel, run, 1.15 * highest / scale, unit, scale)
    for number, panel in enumerate(panels):
        if memory is not None:
            line = panel.axhline if number else panel.axvline
            line(memory / scale, color="black", linestyle="--", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(0, 1.08 * highest / scale)
    handles = [Patch(color=COLORS[kind], label=kind) for kind in kinds_of(plan)][::-1]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    strip = (
        "strip: forward blue, backward green, for weights alone orange, "
        "darker on the rank's second stage; optimizer violet"
    )
    panels[-1].set_xlabel(f"operations of a step ({strip})", fontsize=9)
    return figure


def kinds_of(plan: MemoryPlan) -> list[str]:
    """Return the kinds of bytes that occur in the plan."""
    timelines = [timeline for run in plan.ranks for timeline in run.steps.values()]
    return [kind for kind in KINDS if any(line.of_kind(kind).any() for line in timelines)]


def _draw_bars(panel: Axes, plan: MemoryPlan, unit: str, scale: int) -> None:
    lanes = np.arange(len(plan.ranks))
    left = np.zeros(len(lanes))
    for kind in KINDS:
        sizes = np.array([run.largest.at_peak.get(kind, 0) for run in plan.ranks]) / scale
        panel.barh(lanes, sizes, 0.7, left=left, color=COLORS[kind])
        left += sizes
    for lane, run in enumerate(plan.ranks):
        panel.text(left[lane], lane, f" {run.peak / scale:.2f}", va="center", fontsize=8)
    panel.set_yticks(lanes, [f"rank {run.rank}" for run in plan.ranks], fontsize=8)
    panel.invert_yaxis()
    panel.set_title(f"peaks, {unit}", fontsize=9, loc="left")


def _draw_rank(panel: Axes, run: RankRun, highest: float, unit: str, scale: int) -> None:
    """Draw the curves of a rank, on an axis up to `highest` units."""
    timeline = run.largest
    num_times = timeline.curves.shape[1]
    panel.stackplot(
        np.arange(num_times),
        timeline.curves / scale,
        colors=[COLORS[kind] for kind in KINDS],
        step="post",
        linewidth=0,
    )
    at, peak = timeline.peak_time, timeline.peak / scale
    panel.plot([at], [peak], "v", color="black", markersize=5)
    side = "right" if at > 0.6 * num_times else "left"
    panel.annotate(
        f" {peak:.2f} {unit} in {timeline.when} ", (at, peak), ha=side, va="bottom", fontsize=8
    )
    _draw_strip(panel, timeline, -STRIP * highest)
    panel.set_title(
        f"rank {run.rank}, layers {layers_of(run)}, {run.peak_step}", fontsize=9, loc="left"
    )
    panel.set_ylabel(unit)
    panel.set_xlim(0, num_times)
    panel.set_xticks([])
    panel.set_ylim(-STRIP * highest, highest)


def _draw_strip(panel: Axes, timeline: MemoryTimeline, bottom: float) -> None:
    """Draw the rank's actions from `bottom` to 0."""
    corners, colors = [], []
    for bar in strip_bars(timeline):
        height = bottom / len(bar.colors)
        for place, color in enumerate(bar.colors):
            top, end = place * height, (place + 1) * height
            corners.append([(bar.start, top), (bar.start, end), (bar.stop, end), (bar.stop, top)])
            colors.append(color)
    panel.add_collection(PolyCollection(corners, facecolors=colors, linewidths=0))
