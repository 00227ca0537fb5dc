"""How a run shows itself: lines where there is no terminal, a bar where there is one."""

import contextlib
import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from lather.train.display import LiveDisplay, PlainDisplay
from lather.train.loop import Display
from lather.train.metrics import StepRow

MakeRow = Callable[..., StepRow]


def live() -> tuple[LiveDisplay, io.StringIO]:
    screen = io.StringIO()
    return LiveDisplay(Console(file=screen, force_terminal=True, width=140)), screen


def test_plain_lines_are_the_first_every_nth_and_the_last_step(step_row: MakeRow, capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay(every=3) as display:
        for step in range(1, 9):
            display.step(step_row(step), 8)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/8", "3/8", "6/8", "8/8"]


def test_a_plain_line_has_the_numbers(step_row: MakeRow, capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay(every=1).step(step_row(2, loss=1.23456, lr=3e-3, grad_norm=0.5, tokens_per_second=12345.6), 10)
    assert capsys.readouterr().out == "step 2/10  loss 1.2346  lr 3.00e-03  grad 0.50  12,346 tokens/s\n"


def test_a_skipped_step_always_has_a_plain_line(step_row: MakeRow, capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay(every=100).step(step_row(7, loss=float("nan"), skipped=True), 200)
    assert capsys.readouterr().out == "step 7/200  skipped: loss or gradient not finite\n"


def test_notes_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    display, screen = live()
    with display:
        display.note("resuming [bold]runs/a[/x]")
    PlainDisplay(every=1).note("resuming [bold]runs/a[/x]")
    assert "resuming [bold]runs/a[/x]" in screen.getvalue()
    assert capsys.readouterr().out == "resuming [bold]runs/a[/x]\n"


def test_the_live_bar_counts_the_steps(step_row: MakeRow) -> None:
    display, screen = live()
    with display:
        for step in range(1, 5):
            display.step(step_row(step), 4)
    last = screen.getvalue().rpartition("training")[2]
    assert "4/4" in last
    assert "loss 1.2500" in last
    assert "640 tokens/s" in last


def test_the_live_bar_shows_a_skipped_step(step_row: MakeRow) -> None:
    display, screen = live()
    with display:
        display.step(step_row(1, loss=float("nan"), grad_norm=float("inf"), skipped=True), 4)
    assert "skipped: loss or gradient not finite" in screen.getvalue()


def test_the_live_bar_of_a_resumed_run_starts_where_it_was_and_estimates_from_its_own_steps(
    step_row: MakeRow,
) -> None:
    display, screen = live()
    now = [0.0]
    display.get_time = lambda: now[0]
    with display:
        for step, now[0] in ((101, 1000.0), (102, 1040.0), (103, 1080.0)):
            display.step(step_row(step), 200)
    last = screen.getvalue().rpartition("training")[2]
    assert "103/200" in last
    assert re.search(r"left \x1b\S*1:04:40", last)  # 97 steps of 40 s are left


def test_an_exception_ends_the_live_bar(step_row: MakeRow) -> None:
    display, _ = live()
    with contextlib.suppress(KeyboardInterrupt), display:
        display.step(step_row(1), 4)
        raise KeyboardInterrupt
    assert not display.live.is_started


def test_both_are_displays() -> None:
    assert isinstance(PlainDisplay(every=1), Display)
    assert isinstance(live()[0], Display)
