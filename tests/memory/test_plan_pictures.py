"""The picture of a memory plan that is made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from planned_configs import config_of

from lather.memory.dry_run import RankRun
from lather.memory.ledger import KINDS, Mark, MemoryTimeline
from lather.memory.plan import MemoryPlan
from lather.memory.plan_picture import StripBar, draw, figure_of, strip_bars
from lather.memory.workers import Assumed
from lather.pipeline import picture
from lather.pipeline.schedule import Kind

MIB = 2**20
FORWARD, BACKWARD = picture.COLORS[Kind.FORWARD], picture.COLORS[Kind.BACKWARD]


def timeline(activations: list[int], marks: dict[int, str]) -> MemoryTimeline:
    """Make a timeline of 10 MiB of parameters and these activations."""
    curves = np.zeros((len(KINDS), len(activations)), np.int64)
    curves[KINDS.index("parameters")] = 10 * MIB
    curves[KINDS.index("activations")] = np.array(activations) * MIB
    return MemoryTimeline(curves, {}, [Mark(time, name) for time, name in marks.items()])


STEP = timeline(
    [0, 3, 9, 5, 2, 0],
    {
        0: "a step",
        1: "0F1",
        2: "(0F2;3B0)OVERLAP_F_B",
        3: "between actions",
        4: "optimizer, update",
    },
)


@pytest.fixture
def plan() -> MemoryPlan:
    steps = {"building the model": timeline([1, 1], {0: "building the model"}), "a step": STEP}
    ranks = tuple(
        RankRun(rank, rank, (range(rank, 1 + rank), range(3 - rank, 4 - rank)), steps, {}, {})
        for rank in (0, 1)
    )
    return MemoryPlan(config_of("adamw", parallel={"pp": 2}), 2, Assumed("cpu"), ranks)


def test_the_strip_has_actions_and_phases_from_start_to_end() -> None:
    assert list(strip_bars(STEP)) == [
        StripBar(1, 2, "0F1", (FORWARD[0],)),
        StripBar(2, 3, "(0F2;3B0)OVERLAP_F_B", (FORWARD[0], BACKWARD[1])),
        StripBar(4, 6, "optimizer, update", ("#b39ddb",)),
    ]


def test_marks_of_one_name_are_one_bar() -> None:
    assert list(strip_bars(timeline([0] * 5, {0: "0F1", 2: "0F1", 5: "0F2"}))) == [
        StripBar(0, 5, "0F1", (FORWARD[0],))
    ]


def test_bars_and_curves_are_as_long_as_the_peaks(plan: MemoryPlan) -> None:
    bars, *panels = figure_of(plan, 15 * MIB, "a run").axes
    assert len(panels) == len(plan.ranks)
    ends = dict.fromkeys(range(len(plan.ranks)), 0.0)
    for bar in (patch for patch in bars.patches if isinstance(patch, Rectangle)):
        lane = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(ends[lane])
        ends[lane] += bar.get_width()
    assert ends == {0: 19.0, 1: 19.0}
    for panel in panels:
        *curves, strip = panel.collections
        assert (
            max(path.vertices[:, 1].max() for curve in curves for path in curve.get_paths()) == 19.0
        )
        # an overlapped pair has two boxes
        assert [path.vertices[:, 0].min() for path in strip.get_paths()] == [
            1.0,
            2.0,
            2.0,
            4.0,
        ]
        assert panel.lines[-1].get_ydata()[0] == 15.0  # the device's memory
        assert any("19.00 MiB in (0F2;3B0)OVERLAP_F_B" in text.get_text() for text in panel.texts)


def test_the_picture_grows_with_the_ranks(plan: MemoryPlan, tmp_path: Path) -> None:
    sizes = []
    for number, drawn in enumerate((replace(plan, ranks=plan.ranks[:1]), plan)):
        draw(drawn, 15 * MIB, "a run", tmp_path / f"{number}.png")
        content = (tmp_path / f"{number}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(content[20:24], "big"))
    assert sizes[1] > 1.4 * sizes[0]
