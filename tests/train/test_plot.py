"""Pictures of runs: always a readable PNG that shows what was measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lather.config.changes import History, Row
from lather.errors import RunError, UserError
from lather.train.metrics import MetricsWriter, StepRow
from lather.train.plot import draw, read_curves, short_names

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, step_row: Callable[..., StepRow]) -> MakeRun:
    """Make a run directory with `num_steps` steps and, unless told otherwise, validations."""

    def make(name: str, num_steps: int = 20, *, validated: bool = True, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        writer = MetricsWriter(folder, None)
        for step in range(num_steps + 1):
            if step:
                writer.write(step_row(step, **changes))
            if validated and step % 10 == 0:
                writer.write(
                    {"step": step, "seconds": 0.1 * step, "validation_loss": 6.0 - 0.1 * step}
                )
        writer.close()
        return folder

    return make


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Catch the figure that would have been saved."""

    def figure_of(*runs: Path) -> Figure:
        figures: list[Figure] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                Figure, "savefig", lambda figure, out, **_: (figures.append(figure), out.touch())
            )
            draw(runs, tmp_path / "unused.png")
        return figures[0]

    return figure_of


@pytest.mark.parametrize(
    "runs",
    [
        [{"name": "run"}],
        [{"name": "one"}, {"name": "other", "loss": 2.0}],
        [{"name": "run", "num_steps": 1}],
        [{"name": "run", "num_steps": 1, "validated": False}],
        [{"name": "a$^$b"}],
        [{"name": "_run"}],
    ],
    ids=["one", "two", "one step", "no validation", "mathematics", "hidden name"],
)
def test_a_picture_shows_something(
    make_run: MakeRun, tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    draw([make_run(**run) for run in runs], tmp_path / "out.png")
    picture = imread(tmp_path / "out.png")
    assert picture.shape[0] > 200
    assert picture.shape[1] > 600
    assert len(np.unique(picture.mean(-1))) > 20


def test_changes_of_a_run_are_drawn_where_they_were_made(
    make_run: MakeRun, drawn: Callable[..., Figure]
) -> None:
    run = make_run("run")
    changes = {
        "optim.lr": (0.01, 0.005),
        "train.steps": (15, 20),
        "train.max_grad_norm": (1.0, 0.5),
    }
    history = History((Row(5, {}, "then", "runs/a@5"), Row(15, changes, "then")))
    (run / "changes.jsonl").write_text(history.to_jsonl())
    over_steps = drawn(run).axes[0]
    assert [(text.xy[0], text.get_text()) for text in over_steps.texts] == [
        (5, "fork"),
        (
            15,
            "lr 0.01 \N{RIGHTWARDS ARROW} 0.005, steps 15 \N{RIGHTWARDS ARROW} 20, "
            "max_grad_norm 1 \N{RIGHTWARDS ARROW} 0.5",
        ),
    ]


def test_skipped_steps_and_failed_validations_are_left_out(
    make_run: MakeRun, step_row: Callable[..., StepRow]
) -> None:
    run = make_run("run", 3)
    writer = MetricsWriter(run, 3)
    writer.write(step_row(4, loss=float("nan"), skipped=True))
    writer.write({"step": 4, "seconds": 0.4, "validation_loss": float("nan")})
    writer.write(step_row(5))
    writer.close()
    curves = read_curves(run)
    assert curves.training["step"].tolist() == [1, 2, 3, 5]
    assert len(curves.validation["step"]) == 1


def test_losses_and_times_are_those_of_the_rows(
    make_run: MakeRun, drawn: Callable[..., Figure]
) -> None:
    figure = drawn(make_run("run", 20))
    over_steps, over_seconds, time_share = figure.axes
    for axes, scale in ((over_steps, 1.0), (over_seconds, 0.1)):
        raw, smooth, validation = axes.lines
        expected = pytest.approx([scale * step for step in range(1, 21)])
        assert raw.get_xdata().tolist() == smooth.get_xdata().tolist() == expected
        assert raw.get_ydata().tolist() == [5.0 / step for step in range(1, 21)]
        assert validation.get_xdata().tolist() == pytest.approx([0, scale * 10, scale * 20])
        assert validation.get_ydata().tolist() == pytest.approx([6, 5, 4])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run  4.0000"]
    forward, optimizer = (bars[0].get_width() for bars in time_share.containers)
    assert (forward, optimizer) == pytest.approx((75, 25))


def test_a_run_without_steps_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run", num_steps=3, skipped=True)
    with pytest.raises(
        RunError, match=rf"^{run / 'metrics.jsonl'}: no training steps to draw: give "
    ):
        draw([run], tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_rows_that_are_not_those_of_a_run_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run", num_steps=3)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    with pytest.raises(RunError, match=r", line 1: not a row of metrics \(it has no seconds\): "):
        draw([run], tmp_path / "out.png")


@pytest.mark.parametrize("out", ["absent/out.png", "file/out.png", "/dev/full"])
def test_a_picture_that_cannot_be_written_is_named(
    make_run: MakeRun, tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=rf"^{tmp_path / out}: cannot be written \(.*\): give another --out"
    ):
        draw([make_run("run")], tmp_path / out)


@pytest.mark.parametrize("number", [2, 13, 30])
def test_many_runs_can_be_told_apart_and_all_of_the_legend_is_in_the_picture(
    make_run: MakeRun, drawn: Callable[..., Figure], number: int
) -> None:
    name = "rate{}-and-a-name-that-is-rather-long"
    runs = [
        make_run("a-sweep/" + name.format(index), loss=2.0 + index, validated=False)
        for index in range(number)
    ]
    figure = drawn(*runs)
    figure.draw_without_rendering()
    (legend,), panels = figure.legends, figure.axes
    labels = [text.get_text() for text in legend.get_texts()]
    # greatest final loss first
    assert labels == [name.format(index) for index in reversed(range(number))]
    box, edge = legend.get_window_extent(), figure.bbox
    assert 0 <= box.x0 < box.x1 <= edge.x1
    assert 0 <= box.y0 < box.y1 <= edge.y1
    for axes in panels:
        assert not box.overlaps(axes.get_window_extent())
        assert axes.get_tightbbox().x1 <= edge.x1
    lines = [line for line in panels[0].lines if line.get_linestyle() != "None"]
    looks = {(line.get_color(), line.get_linestyle()) for line in lines if line.get_alpha() is None}
    assert len(looks) == number
    assert [bar.get_text() for bar in panels[2].get_yticklabels()] == labels


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/one"], ["one"]),
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["runs/soap", "runs/muon"], ["soap", "muon"]),
        (["runs/one", "runs/one"], ["one", "one"]),
        (["runs/" + "a" * 50 + "-end"], ["\u2026" + "a" * 44 + "-end"]),
    ],
)
def test_names_are_without_the_folder_that_all_have_in_common(
    folders: list[str], names: list[str]
) -> None:
    assert short_names([Path(folder) for folder in folders]) == names
