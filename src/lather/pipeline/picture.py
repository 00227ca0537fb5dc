"""Draws a timeline: a lane per rank, colors by kind of action, micro-batch numbers where they fit,
idle time hatched.

A forward chunk is blue and a backward chunk green; if it is split, the input part is light green
and the weight part orange. Chunks of a rank's second stage, on the way back up the V, are darker.
In an overlapped pair the forward chunk is drawn above the backward chunk. Pieces of the optimizer's
refreshes that fill idle time are violet. A strip below has what happens beside the computation:
gathers of parameters are black, sums of gradients red, and transfers that took time gray. The
picture grows with the number of chunks in a lane, up to a limit; numbers that would be too small to
read are left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lather.errors import RunError
from lather.files import read_text, whole_file
from lather.pipeline.replay import Event, Timeline
from lather.pipeline.schedule import COMPUTE, Action, Kind

COLORS = {
    Kind.FORWARD: ("#7db3e8", "#2f6db3"),
    Kind.BACKWARD: ("#8ccf9a", "#3a8f54"),
    Kind.BACKWARD_INPUT: ("#cdeac0", "#a7d3a0"),
    Kind.BACKWARD_WEIGHT: ("#f6b26b", "#e08a2e"),
}
"""Colors on the rank's first stage, and on its second."""
REFRESH = "#b39ddb"
OTHER = "#8a8a8a"
BESIDE = {Kind.UNSHARD: ("#333333", "gather"), Kind.REDUCE_GRAD: ("#c0392b", "sum of gradients")}
"""Colors and names of what happens to parameters beside the computation."""
DARK = {"#2f6db3", "#3a8f54"}
"""Colors that need white numbers."""
LABELS = dict(
    zip(COLORS, ("forward", "backward", "backward, input", "backward, weights"), strict=True)
)

IDLE: dict[str, Any] = {"facecolor": "#f7f7f7", "edgecolor": "#cfcfcf", "hatch": "////"}

DPI = 110
LANE, STRIP = 0.42, 0.12
"""Half the height of a lane, and the height of the strip of transfers, in units of the distance
between lanes."""
MIN_WIDTH, MAX_WIDTH, INCHES_PER_CHUNK = 12.0, 36.0, 0.17
MAX_HEIGHT = 36.0
SMALLEST_NUMBER, LARGEST_NUMBER = 5.0, 9.0
"""Font sizes in points; numbers that would be smaller are left out."""


@dataclass(frozen=True)
class Bar:
    """A rectangle in data coordinates, with its number."""

    left: float
    right: float
    bottom: float
    top: float
    color: str
    action: str
    number: int | None = None


def draw_timeline(rows: Iterable[Event], path: Path, title: str, *, unit: str = "s") -> None:
    """Write a PNG of the events `rows`, of which there is at least one; `unit` is that of their
    times. The bubble fraction is added to `title`.

    Raises UserError if `path` cannot be written or no event is a computation.
    """
    timeline = Timeline(tuple(rows))
    if not timeline.makespan > 0:
        raise RunError(f"{path}: nothing to draw: no action of the timeline computes for any time")
    num_ranks = len(timeline.ranks)
    chunks = max(Counter(event.rank for event in timeline.computing).values())
    width = min(max(MIN_WIDTH, 1.5 + INCHES_PER_CHUNK * chunks), MAX_WIDTH)
    scale = (width / MIN_WIDTH) ** 0.6  # for lanes and fonts
    height = min(scale * (1.1 + 0.5 * num_ranks), MAX_HEIGHT)
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    boxes = list(bars(timeline))
    _draw_lanes(axes, timeline, boxes)
    bubble = f"{title}: bubble {timeline.bubble_fraction:.1%}"
    axes.set_title(bubble, loc="left", fontsize=11 * scale)
    axes.set_xlabel(f"time ({unit})", fontsize=9 * scale)
    axes.tick_params(axis="x", labelsize=8 * scale)
    axes.tick_params(axis="y", labelsize=min(9 * scale, 0.5 * 72 * height / num_ranks))
    figure.legend(
        handles=_legend(timeline),
        loc="outside lower left",
        ncols=7,
        frameon=False,
        fontsize=8 * scale,
    )
    figure.draw_without_rendering()
    # fix the layout: the font sizes depend on it, and it need not measure every number
    figure.set_layout_engine("none")
    _draw_numbers(axes, boxes)
    with whole_file(path, "--out") as aside:
        figure.savefig(aside, dpi=DPI, format="png")


def _stages(timeline: Timeline) -> dict[int, list[int]]:
    """Return the stages that each rank computes."""
    stages: dict[int, set[int]] = {rank: set() for rank in timeline.ranks}
    for event in timeline.computing:
        stages[event.rank].update(chunk.stage for chunk in event.action.chunks)
    return {rank: sorted(of_rank) for rank, of_rank in stages.items()}


def bars(timeline: Timeline) -> Iterator[Bar]:
    """Make the boxes of all events, in a lane for each of the timeline's ranks; times begin with
    the timeline."""
    stages = _stages(timeline)
    # strips last, above the actions beside which they happen
    for event in sorted(timeline.events, key=lambda event: event.action.kind not in COMPUTE):
        middle, text = timeline.ranks.index(event.rank), str(event.action)
        left, right = event.start - timeline.start, event.end - timeline.start
        if event.action.kind is Kind.REFRESH:
            yield Bar(left, right, middle + LANE, middle - LANE, REFRESH, text)
        elif event.action.kind in COMPUTE:
            height = 2 * LANE / len(event.action.chunks)
            for index, chunk in enumerate(event.action.chunks):
                color = COLORS[chunk.kind][chunk.stage > stages[event.rank][0]]
                top = middle - LANE + index * height
                yield Bar(left, right, top + height, top, color, text, chunk.micro_batch)
        elif right > left:
            color, _ = BESIDE.get(event.action.kind, (OTHER, ""))
            yield Bar(left, right, middle + LANE, middle + LANE - STRIP, color, text)


def _draw_lanes(axes: Axes, timeline: Timeline, boxes: Sequence[Bar]) -> None:
    """Draw the axes, hatched lanes, and the boxes above them."""
    lanes = list(range(len(timeline.ranks)))
    axes.barh(lanes, timeline.makespan, 2 * LANE, linewidth=0, zorder=1, **IDLE)
    corners = [
        [(b.left, b.bottom), (b.left, b.top), (b.right, b.top), (b.right, b.bottom)] for b in boxes
    ]
    edge = 0.4 if len(boxes) < 10_000 else 0.0
    colors = [b.color for b in boxes]
    axes.add_collection(
        PolyCollection(corners, facecolors=colors, edgecolors="white", linewidths=edge, zorder=2)
    )
    names = [
        f"rank {rank}  (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
        for rank, stages in _stages(timeline).items()
    ]
    axes.set_yticks(lanes, names)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, timeline.makespan)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_numbers(axes: Axes, boxes: Sequence[Bar]) -> None:
    """Draw micro-batch numbers in the bars that are large enough."""
    numbered = [(box, box.number) for box in boxes if box.number is not None]
    digits = len(str(max((number for _, number in numbered), default=0)))
    points = abs(axes.transData.transform((1, 1)) - axes.transData.transform((0, 0))) * 72 / DPI
    for box, number in numbered:
        width, height = (box.right - box.left) * points[0], (box.bottom - box.top) * points[1]
        # a digit is 0.62 times as wide as the font size
        size = min(0.85 * width / (0.62 * digits), 0.8 * height, LARGEST_NUMBER)
        if size >= SMALLEST_NUMBER:
            axes.text(
                (box.left + box.right) / 2,
                (box.top + box.bottom) / 2,
                str(number),
                ha="center",
                va="center_baseline",
                fontsize=size,
                color="white" if box.color in DARK else "0.15",
                zorder=3,
            )


def color_key(timeline: Timeline) -> list[tuple[str, str]]:
    """Colors of the kinds that a timeline has, and their names."""
    kinds = {chunk.kind for event in timeline.events for chunk in event.action.chunks}
    colors = [(COLORS[kind][0], label) for kind, label in LABELS.items() if kind in kinds]
    if Kind.REFRESH in kinds:
        colors.append((REFRESH, "refresh"))
    beside = {
        event.action.kind
        for event in timeline.events
        if event.action.kind not in (*COMPUTE, Kind.REFRESH) and event.end > event.start
    }
    colors += [key for kind, key in BESIDE.items() if kind in beside]
    if beside - BESIDE.keys():
        colors.append((OTHER, "transfers"))
    return colors


def _legend(timeline: Timeline) -> list[Patch]:
    patches = [Patch(facecolor=color, label=label) for color, label in color_key(timeline)]
    patches.append(Patch(**IDLE, label="idle"))
    if any(len(stages) > 1 for stages in _stages(timeline).values()):
        patches.append(Patch(facecolor="none", label="(darker: the rank's second stage)"))
    return patches


def read_timeline(path: Path) -> tuple[int, list[Event]]:
    """Read the newest step in `path` and its events. A line is {"step", "rank", "action", "start",
    "end"}, with times in seconds.

    An incomplete last line is ignored. Raises RunError if there is no such file, or if it is not a
    timeline.
    """
    try:
        lines = read_text(path).splitlines(keepends=True)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be read ({error.strerror}): the run must have written a timeline"
        ) from None
    except UnicodeError as error:
        raise RunError(f"{path}: not a timeline ({error}): restore the file") from None
    complete = [line for line in lines if line.endswith("\n") and line.strip()]
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in complete]
        step = max((int(row["step"]) for row in rows), default=0)
        events = [
            Event(
                int(row["rank"]),
                Action.from_text(row["action"]),
                float(row["start"]),
                float(row["end"]),
            )
            for row in rows
            if row["step"] == step
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not a timeline ({error!r}): restore the file") from None
    if not events:
        raise RunError(
            f"{path}: no actions to draw: give the folder of a run that wrote a timeline"
        )
    return step, events
