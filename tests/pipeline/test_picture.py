"""Timelines as pictures: every chunk has its box, at its place and in its color."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from lather.errors import RunError, UserError
from lather.pipeline.picture import COLORS, draw_timeline, read_timeline
from lather.pipeline.replay import Durations, Event, replay
from lather.pipeline.schedule import Action, Kind, dualpipev

EQUAL = Durations({Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0})


def event(rank: int, text: str, start: float, end: float) -> Event:
    return Event(rank, Action.from_text(text), start, end)


def figure_of(rows: list[Event], monkeypatch: pytest.MonkeyPatch, path: Path) -> Figure:
    figures: list[Figure] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Figure, "savefig", lambda figure, out, **_: (figures.append(figure), out.touch())
        )
        draw_timeline(rows, path / "unused.png", "a run")
    return figures[0]


def test_a_picture_of_the_table_is_written(tmp_path: Path) -> None:
    draw_timeline(replay(dualpipev(2, 5), EQUAL).events, tmp_path / "out.png", "table")
    picture = imread(tmp_path / "out.png")
    assert picture.shape[0] > 150
    assert picture.shape[1] > 1000
    for color in (
        COLORS[Kind.FORWARD][0],
        COLORS[Kind.FORWARD][1],
        COLORS[Kind.BACKWARD_WEIGHT][0],
    ):
        rgb = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (np.abs(picture[..., :3] - rgb).max(-1) < 0.01).sum() > 500


def test_boxes_are_the_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        event(0, "0F7", 100.0, 102.0),
        event(0, "(0F8;3B7)OVERLAP_F_B", 103.0, 106.0),
        event(0, "0SEND_F8", 106.0, 106.5),
        event(0, "0UNSHARD", 103.0, 103.0),
        event(1, "1W9", 104.0, 108.0),
    ]
    axes = figure_of(rows, monkeypatch, tmp_path).axes[0]
    (boxes,) = (
        collection for collection in axes.collections if isinstance(collection, PolyCollection)
    )
    extents = [box.get_extents().bounds for box in boxes.get_paths()]
    assert [(x, width) for x, _, width, _ in extents] == [
        (0.0, 2.0),
        (3.0, 3.0),
        (3.0, 3.0),
        (4.0, 4.0),
        (6.0, 0.5),  # the strip is above what it is beside
    ]
    heights = [height for *_, height in extents]
    assert extents[0][1] + heights[0] / 2 == pytest.approx(0)  # in the middle of its lane
    assert heights[1] == pytest.approx(heights[0] / 2)
    assert extents[1][1] < extents[2][1]  # the forward chunk is above, as the axis points down
    assert extents[3][1] == pytest.approx(1 + extents[0][1])
    assert [text.get_text() for text in axes.texts] == ["7", "8", "7", "9"]
    assert axes.get_title(loc="left") == "a run: bubble 43.8%"
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 0  (stages 0, 3)",
        "rank 1  (stage 1)",
    ]


def test_a_timeline_is_read_from_its_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 9, "rank": 0, "action": "0F0", "start": 1.0, "end": 2.0},
        {"step": 10, "rank": 1, "action": "(0F3;3B1)OVERLAP_F_B", "start": 3.0, "end": 4.0},
        {"step": 10, "rank": 0, "action": "0W0", "start": 5.0, "end": 6.0},
    ]
    file = tmp_path / "timeline.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "ra')
    assert read_timeline(file) == (
        10,
        [event(1, "(0F3;3B1)OVERLAP_F_B", 3.0, 4.0), event(0, "0W0", 5.0, 6.0)],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", "no actions"),
        ("{}\n", "not a timeline"),
        ("[]\n", "not a timeline"),
        ("x\n", "not a timeline"),
        ('{"step": 1, "rank": 0, "action": "0Q0", "start": 0, "end": 1}\n', "0Q0.*not an action"),
        ('{"step": 1, "rank": 0, "action": 7, "start": 0, "end": 1}\n', "not a timeline"),
    ],
    ids=[
        "missing",
        "empty",
        "no fields",
        "a list",
        "no JSON",
        "unknown action",
        "action of another type",
    ],
)
def test_another_file_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RunError, match=message):
        read_timeline(file)


def test_what_cannot_be_drawn_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing to draw"):
        draw_timeline([event(0, "0UNSHARD", 0.0, 1.0)], tmp_path / "out.png", "empty")
    with pytest.raises(UserError, match="cannot be written"):
        draw_timeline([event(0, "0F0", 0.0, 1.0)], tmp_path / "nowhere" / "out.png", "lost")
