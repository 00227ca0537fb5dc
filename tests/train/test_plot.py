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
from lather.train.plot import draw, read_curves
from lather.train.run_names import short_names

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


def pixels(runs: list[Path], out: Path) -> np.ndarray:
    draw(runs, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    return imread(out)


def shows_something(picture: np.ndarray) -> bool:
    height, width, _ = picture.shape
    return height > 200 and width > 600 and len(np.unique(picture.mean(-1))) > 20


def test_one_run_and_several_give_different_pictures(make_run: MakeRun, tmp_path: Path) -> None:
    one, other = make_run("one"), make_run("other", loss=2.0)
    pictures = [
        pixels(runs, tmp_path / f"{index}.png")
        for index, runs in enumerate(([one], [other], [one, other]))
    ]
    assert all(map(shows_something, pictures))
    assert len({picture.tobytes() for picture in pictures}) == 3


@pytest.mark.parametrize(("num_steps", "validated"), [(1, True), (1, False)])
def test_a_run_of_one_step_or_without_validation_is_drawn(
    make_run: MakeRun, tmp_path: Path, num_steps: int, validated: bool
) -> None:
    assert shows_something(
        pixels([make_run("run", num_steps, validated=validated)], tmp_path / "out.png")
    )


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


def test_the_curves_are_the_rows(make_run: MakeRun) -> None:
    curves = read_curves(make_run("run", 10))
    assert curves.name == "run"
    assert curves.training["step"].tolist() == list(range(1, 11))
    assert curves.training["loss"].tolist() == [5.0 / step for step in range(1, 11)]
    assert curves.training["seconds"].tolist() == pytest.approx(
        [0.1 * step for step in range(1, 11)]
    )
    expected = {"step": [0, 10], "seconds": [0.0, 1.0], "validation_loss": [6.0, 5.0]}
    assert {name: column.tolist() for name, column in curves.validation.items()} == expected
    assert curves.optimizer_share == pytest.approx(0.25)
    assert curves.training["step_seconds"].tolist() == pytest.approx([0.1] * 10)


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


def test_loss_is_drawn_over_steps_and_over_seconds(
    make_run: MakeRun, drawn: Callable[..., Figure]
) -> None:
    figure = drawn(make_run("run", 20))
    over_steps, over_seconds, _ = figure.axes
    for axes, scale in ((over_steps, 1.0), (over_seconds, 0.1)):
        raw, smooth, validation = axes.lines
        assert (
            raw.get_xdata().tolist()
            == smooth.get_xdata().tolist()
            == pytest.approx([scale * step for step in range(1, 21)])
        )
        assert raw.get_ydata().tolist() == [5.0 / step for step in range(1, 21)]
        np.testing.assert_allclose(smooth.get_ydata(), raw.get_ydata(), rtol=0.2)
        assert not np.array_equal(smooth.get_ydata(), raw.get_ydata())
        assert smooth.get_ydata()[0] == pytest.approx(raw.get_ydata()[0])
        assert validation.get_xdata().tolist() == pytest.approx([0, scale * 10, scale * 20])
        assert validation.get_ydata().tolist() == pytest.approx([6, 5, 4])
    training, validation = (text.get_text() for text in figure.legends[0].get_texts())
    assert "run" in training
    assert "4.000" in validation


@pytest.mark.parametrize("names", [("a", "b"), ("a/run", "b/run")])
def test_every_run_has_a_bar_of_its_own(
    make_run: MakeRun, drawn: Callable[..., Figure], names: tuple[str, str]
) -> None:
    figure = drawn(make_run(names[0], step_seconds=0.1), make_run(names[1], step_seconds=0.2))
    forward, optimizer = figure.axes[2].containers
    assert [
        bar.get_width() + rest.get_width() for bar, rest in zip(optimizer, forward, strict=True)
    ] == pytest.approx([100, 200])
    assert len({bar.get_y() for bar in optimizer}) == 2


@pytest.mark.parametrize("name", ["_run", "a$^$b"])
def test_a_run_of_any_name_is_in_the_legend(
    make_run: MakeRun, drawn: Callable[..., Figure], tmp_path: Path, name: str
) -> None:
    run = make_run(name)
    assert len(drawn(run).legends[0].get_texts()) == 2
    assert shows_something(pixels([run], tmp_path / "out.png"))


def test_the_current_folder_has_a_name(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run("run"))
    assert read_curves(Path()).name


@pytest.mark.parametrize("rows", ["absent", "empty", "validation only", "skipped only"])
def test_a_run_without_steps_is_named(make_run: MakeRun, tmp_path: Path, rows: str) -> None:
    run = make_run(
        "run",
        num_steps=3 if rows == "skipped only" else 0,
        validated=rows == "validation only",
        skipped=True,
    )
    if rows == "absent":
        (run / "metrics.jsonl").unlink()
    with pytest.raises(
        RunError, match=rf"^{run / 'metrics.jsonl'}: no training steps to draw: give "
    ):
        draw([run], tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("out", ["absent/out.png", "file/out.png"])
def test_a_picture_that_cannot_be_written_is_named(
    make_run: MakeRun, tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=rf"^{tmp_path / out}: cannot be written \(.*\): give another --out"
    ):
        draw([make_run("run")], tmp_path / out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full disk at hand")
def test_a_full_disk_is_named(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"^/dev/full: cannot be written"):
        draw([make_run("run")], Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("number", [2, 5, 13, 30])
def test_many_runs_can_be_told_apart_and_all_of_the_legend_is_in_the_picture(
    make_run: MakeRun, drawn: Callable[..., Figure], number: int
) -> None:
    runs = [
        make_run(
            f"a-sweep-of-many-runs-rate{index}-and-a-name-that-is-rather-long",
            loss=2.0 + index,
            validated=False,
        )
        for index in range(number)
    ]
    figure = drawn(*runs)
    figure.draw_without_rendering()
    (legend,), panels = figure.legends, figure.axes
    labels = [text.get_text() for text in legend.get_texts()]
    expected = [
        f"\u2026rate{index}-and-a-name-that-is-rather-long" for index in reversed(range(number))
    ]
    # greatest final loss first
    assert [label.split("\u2026")[1][:5] for label in labels] == [name[1:6] for name in expected]
    assert "a-sweep-of-many-runs-" in legend.get_title().get_text()
    box, edge = legend.get_window_extent(), figure.bbox
    assert 0 <= box.x0 < box.x1 <= edge.x1
    assert 0 <= box.y0 < box.y1 <= edge.y1
    for axes in panels:
        assert not box.overlaps(axes.get_window_extent())
        assert axes.get_tightbbox().x1 <= edge.x1
    looks = {
        (line.get_color(), line.get_linestyle())
        for line in panels[0].lines
        if not str(line.get_label()).startswith("_")
    }
    assert len(looks) == number
    assert [bar.get_text() for bar in panels[2].get_yticklabels()] == labels


def test_an_axis_of_a_long_run_has_small_numbers(
    make_run: MakeRun, drawn: Callable[..., Figure]
) -> None:
    over_time = drawn(make_run("run", 20, seconds=7200.0)).axes[1]
    assert over_time.get_xlabel() == "time of training, min"
    assert over_time.lines[0].get_xdata()[-1] == pytest.approx(120)


@pytest.mark.parametrize(
    ("folders", "names", "common"),
    [
        (["runs/one"], ["one"], ""),
        (["a/run", "b/run"], ["a", "b"], ""),
        (["runs/soap", "runs/muon"], ["soap", "muon"], ""),
        (["runs/sweep-1-soap", "runs/sweep-1-muon"], ["\u2026soap", "\u2026muon"], "sweep-1-"),
        (["runs/sweep-1", "runs/sweep-1-muon"], ["\u20261", "\u20261-muon"], "sweep-"),
        (["x/a/run", "x/b/run", "x/b/other"], ["a/run", "b/run", "b/other"], ""),
        (["runs/one", "runs/one"], ["one", "one"], ""),
        (["runs/" + "a" * 50 + "-end"], ["a" * 12 + "\u2026" + "a" * 19 + "-end"], ""),
    ],
)
def test_names_are_without_what_all_have_in_common(
    folders: list[str], names: list[str], common: str
) -> None:
    assert short_names([Path(folder) for folder in folders]) == (names, common)
