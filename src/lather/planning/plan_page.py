"""Writes a memory plan as one HTML page without further files: verdict, table, bars, and each rank's bytes over every step, which can be
explored with the mouse. The template `plan_page.html` draws the values of `page_data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.colors import to_hex

from lather import page
from lather.memory.profile_report import unit_of, whole_file
from lather.planning.ledger import KINDS, MemoryTimeline
from lather.planning.plan import MemoryPlan
from lather.planning.plan_picture import COLORS, doings, kinds_of
from lather.planning.plan_report import describe_partition, layers_of, needs, verdict

POINTS = 700
"""Points of each curve; a screen cannot show more."""


def write_page(plan: MemoryPlan, memory: int | None, title: str, configuration: str, out: Path) -> None:
    """Write the page; `configuration` is TOML. Raises UserError if `out` cannot be written."""
    with whole_file(out, "--html") as aside:
        page.write_page(aside, ("lather.planning", "plan_page.html"), page_data(plan, memory), title=title, configuration=configuration)


def page_data(plan: MemoryPlan, memory: int | None) -> dict[str, Any]:
    """Return the values of the page: kinds with their colors, and the layers and steps of each rank."""
    unit, scale = unit_of(max(plan.largest.peak, memory or 0))
    kinds = kinds_of(plan)
    notes = [verdict(plan, memory)] if memory is not None else []
    if plan.partition is not None:
        notes.append(describe_partition(plan, plan.partition))
    if plan.device == "gpu":
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
                "steps": {name: _step(timeline.thinned(POINTS), kinds) for name, timeline in run.steps.items()},
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
