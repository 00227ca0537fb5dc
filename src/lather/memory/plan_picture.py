"""Draws a memory plan: the peaks of all pipeline ranks as bars, and each rank's bytes during its
largest step, stacked by kind, with a strip of the rank's actions below.

`write_page` writes it as one HTML page without further files: verdict, table, bars, and each rank's
bytes over every step, which can be explored with the mouse. The template `plan_page.html` draws the
values of `page_data`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lather import page
from lather.files import whole_file
from lather.memory.dry_run import RankRun
from lather.memory.ledger import KINDS, MemoryTimeline
from lather.memory.plan import MemoryPlan
from lather.memory.plan_report import describe_partition, layers_of, needs, verdict
from lather.memory.profile_report import unit_of
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
POINTS = 700
"""Points of each curve of the page; a screen cannot show more."""


@dataclass(frozen=True)
class Doing:
    """An action or phase of a rank, with its interval of a timeline."""

    start: int
    stop: int
    name: str
    """Name in the timeline, such as "3B2"."""
    colors: tuple[str, ...]
    """One color; for an overlapped pair two, the forward chunk's first."""


def doings(timeline: MemoryTimeline) -> Iterator[Doing]:
    """Yield the schedule's actions, in the colors of `lather plot --schedule`, and the optimizer's
    phases."""
    actions = {mark.name: _action(mark.name) for mark in timeline.marks}
    first_stage = min(
        (
            chunk.stage
            for action in actions.values()
            if action is not None
            for chunk in action.chunks
        ),
        default=0,
    )
    for name, several in groupby(timeline.spans(), key=lambda span: span[0]):
        spans = [(start, stop) for _, start, stop in several]
        (start, _), (_, stop) = spans[0], spans[-1]
        if start >= stop:
            continue
        if (action := actions[name]) is not None:
            yield Doing(
                start,
                stop,
                name,
                tuple(
                    picture.COLORS[chunk.kind][chunk.stage > first_stage] for chunk in action.chunks
                ),
            )
        elif name.startswith("optimizer"):
            yield Doing(start, stop, name, (picture.REFRESH,))


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
    unit, scale = unit_of(max(plan.largest.peak, memory or 0))
    axes = figure.subplots(1 + ranks, 1, height_ratios=[bars, *[2.6] * ranks])
    _draw_bars(axes[0], plan, memory, unit, scale)
    for panel, run in zip(axes[1:], plan.ranks, strict=True):
        _draw_rank(panel, run, memory, unit, scale)
        panel.set_ylim(axes[1].get_ylim())
    handles = [Patch(color=COLORS[kind], label=kind) for kind in kinds_of(plan)][::-1]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    strip = (
        "strip: forward blue, backward green, for weights alone orange, "
        "darker on the rank's second stage; optimizer violet"
    )
    axes[-1].set_xlabel(f"operations of a step ({strip})", fontsize=9)
    return figure


def kinds_of(plan: MemoryPlan) -> list[str]:
    """Return the kinds of bytes that occur in the plan."""
    timelines = [timeline for run in plan.ranks for timeline in run.steps.values()]
    return [
        kind
        for row, kind in enumerate(KINDS)
        if any(timeline.curves[row].any() for timeline in timelines)
    ]


def _draw_bars(panel: Axes, plan: MemoryPlan, memory: int | None, unit: str, scale: int) -> None:
    lanes = np.arange(len(plan.ranks))
    at_peak = [run.largest.at_peak for run in plan.ranks]
    left = np.zeros(len(lanes))
    for kind in KINDS:
        sizes = np.array([found.get(kind, 0) for found in at_peak]) / scale
        panel.barh(lanes, sizes, 0.7, left=left, color=COLORS[kind])
        left += sizes
    for lane, run in enumerate(plan.ranks):
        panel.text(left[lane], lane, f" {run.peak / scale:.2f}", va="center", fontsize=8)
    if memory is not None:
        panel.axvline(memory / scale, color="black", linestyle="--", linewidth=0.8)
    panel.set_yticks(lanes, [f"rank {run.rank}" for run in plan.ranks], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.08 * max(plan.largest.peak, memory or 0) / scale)
    panel.set_title(f"peaks, {unit}", fontsize=9, loc="left")
    panel.spines[["top", "right"]].set_visible(False)


def _draw_rank(panel: Axes, run: RankRun, memory: int | None, unit: str, scale: int) -> None:
    timeline = run.largest
    times = np.arange(timeline.curves.shape[1])
    panel.stackplot(
        times,
        timeline.curves / scale,
        colors=[COLORS[kind] for kind in KINDS],
        step="post",
        linewidth=0,
    )
    at, peak = timeline.peak_time, timeline.peak / scale
    highest = 1.15 * max(peak, 0 if memory is None else memory / scale)
    panel.plot([at], [peak], "v", color="black", markersize=5)
    side = "right" if at > 0.6 * len(times) else "left"
    panel.annotate(
        f" {peak:.2f} {unit} in {timeline.when} ", (at, peak), ha=side, va="bottom", fontsize=8
    )
    if memory is not None:
        panel.axhline(memory / scale, color="black", linestyle="--", linewidth=0.8)
    _draw_strip(panel, timeline, -STRIP * highest)
    panel.set_title(
        f"rank {run.rank}, layers {layers_of(run)}, {run.peak_step}", fontsize=9, loc="left"
    )
    panel.set_ylabel(unit)
    panel.set_xlim(0, len(times))
    panel.set_xticks([])
    panel.set_ylim(-STRIP * highest, highest)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_strip(panel: Axes, timeline: MemoryTimeline, bottom: float) -> None:
    """Draw the rank's actions from `bottom` to 0."""
    corners, colors = [], []
    for doing in doings(timeline):
        height = bottom / len(doing.colors)
        for place, color in enumerate(doing.colors):
            top = place * height
            corners.append(
                [
                    (doing.start, top),
                    (doing.start, top + height),
                    (doing.stop, top + height),
                    (doing.stop, top),
                ]
            )
            colors.append(color)
    panel.add_collection(PolyCollection(corners, facecolors=colors, linewidths=0))


def write_page(
    plan: MemoryPlan, memory: int | None, title: str, configuration: str, out: Path
) -> None:
    """Write the page; `configuration` is TOML. Raises UserError if `out` cannot be written."""
    with whole_file(out, "--html") as aside:
        page.write_page(
            aside,
            ("lather.memory", "plan_page.html"),
            page_data(plan, memory),
            title=title,
            configuration=configuration,
        )


def page_data(plan: MemoryPlan, memory: int | None) -> dict[str, Any]:
    """Return the values of the page: kinds with their colors, and the layers and steps of each
    rank."""
    unit, scale = unit_of(max(plan.largest.peak, memory or 0))
    kinds = kinds_of(plan)
    notes = [verdict(plan, memory)] if memory is not None else []
    if plan.partition is not None:
        notes.append(describe_partition(plan, plan.partition))
    if plan.assumed.device == "gpu":
        notes.append(needs(plan))
    return {
        "unit": unit,
        "scale": scale,
        "memory": memory,
        "fits": memory is None or plan.needed <= memory,
        "notes": notes,
        "kinds": [{"name": kind, "color": to_hex(COLORS[kind])} for kind in kinds],
        "ranks": [
            {
                "rank": run.rank,
                "layers": layers_of(run),
                "peakStep": run.peak_step,
                "steps": {
                    name: _step(timeline.thinned(POINTS), kinds)
                    for name, timeline in run.steps.items()
                },
            }
            for run in plan.ranks
        ],
    }


def _step(timeline: MemoryTimeline, kinds: list[str]) -> dict[str, Any]:
    """Return the curves in bytes, the marks with their times, and the boxes of the strip."""
    return {
        "curves": [timeline.curves[KINDS.index(kind)].tolist() for kind in kinds],
        "peak": timeline.peak_time,
        "marks": [[mark.time, mark.name] for mark in timeline.marks],
        "strip": [[doing.start, doing.stop, *doing.colors] for doing in doings(timeline)],
    }
