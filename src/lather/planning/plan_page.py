"""A memory plan as one HTML page that needs nothing else: verdict, table, bars, and each rank's bytes over every step, to be looked into
with the pointer. The page (`plan_page.html`) draws what `page_data` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.colors import to_hex

from lather import page
from lather.memory.profile_report import unit_of, whole_file
from lather.planning.ledger import KINDS, MemoryTimeline
from lather.planning.plan import MemoryPlan
from lather.planning.plan_picture import COLORS, doings, kinds_of
from lather.planning.plan_report import dealt, layers_of, needs, verdict

POINTS = 700
"""Points kept of each curve; more are not told apart on a screen."""


def write_page(plan: MemoryPlan, memory: int | None, title: str, configuration: str, out: Path) -> None:
    """Write the page; `configuration`: as TOML. Raises UserError if `out` cannot be written."""
    with whole_file(out, "--html") as aside:
        page.write_page(aside, ("lather.planning", "plan_page.html"), page_data(plan, memory), title=title, configuration=configuration)


def page_data(plan: MemoryPlan, memory: int | None) -> dict[str, Any]:
    """Plain values: kinds with their colors, and of each rank its layers and steps."""
    unit, scale = unit_of(max(plan.largest.peak, memory or 0))
    kinds = kinds_of(plan)
    notes = [verdict(plan, memory)] if memory is not None else []
    if plan.partition is not None:
        notes.append(dealt(plan, plan.partition))
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
    """Curves in bytes; what is done, by its start; the boxes of the strip below."""
    return {
        "curves": [timeline.curves[KINDS.index(kind)].tolist() for kind in kinds],
        "peak": timeline.peak_time,
        "marks": [[mark.time, mark.name] for mark in timeline.marks],
        "strip": [[doing.start, doing.stop, *doing.colors] for doing in doings(timeline)],
    }
