"""How a run shows itself: lines where there is no terminal, a bar where there is one."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from lather.engine.step_reading import NO_LABELS, NOT_FINITE
from lather.train.display import LiveDisplay, PlainDisplay
from lather.train.metrics import StepRow

MakeRow = Callable[..., StepRow]


def live(width: int = 140) -> tuple[LiveDisplay, io.StringIO]:
    screen = io.StringIO()
    return LiveDisplay(Console(file=screen, force_terminal=True, width=width)), screen


def frames(screen: io.StringIO) -> list[str]:
    """The lines that were on the screen, without colors."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()))


def test_plain_lines_are_the_first_every_nth_and_the_last_step(
    step_row: MakeRow, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainDisplay(every=3) as display:
        for step in range(1, 9):
            display.step(step_row(step), 8)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/8", "3/8", "6/8", "8/8"]


def test_a_plain_line_has_the_numbers(
    step_row: MakeRow, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"loss": 1.23456, "lr": 3e-3, "grad_norm": 0.5, "tokens_per_second": 12345.6}
    row = step_row(2, **numbers, seconds=4.0, seconds_left=62.0, peak_memory_bytes=3 * 2**29)
    PlainDisplay(every=1).step(replace(row, mfu=math.nan), 10)
    PlainDisplay(every=1).step(replace(row, mfu=0.2345, total_tokens=21_234_567), 10)
    plain, with_mfu = capsys.readouterr().out.splitlines()
    start, end = (
        "step 2/10  loss 1.2346  lr 3.00e-03  grad 0.50  12,346 tokens/s  ",
        "4 s, 1 min 02 s left",
    )
    assert plain == f"{start}1.50 GiB  epoch 0.50  128 tokens  {end}"
    assert with_mfu == f"{start}MFU 23.4%  1.50 GiB  epoch 0.50  21.23 M tokens  {end}"


def test_the_time_left_is_not_shown_before_it_is_known(
    step_row: MakeRow, capsys: pytest.CaptureFixture[str]
) -> None:
    PlainDisplay(every=1).step(step_row(1, seconds_left=math.nan), 1000)
    assert capsys.readouterr().out.endswith("64 tokens  0 s\n")


def test_a_skipped_step_always_has_a_plain_line(
    step_row: MakeRow, capsys: pytest.CaptureFixture[str]
) -> None:
    PlainDisplay(every=100).step(
        step_row(7, loss=float("nan"), skip_reason=NOT_FINITE, skipped=True), 200
    )
    shown = capsys.readouterr().out
    assert shown.startswith("step 7/200  skipped: loss or gradient not finite  epoch 1.75  ")


def test_a_step_without_labels_has_a_plain_line_when_others_have(
    step_row: MakeRow,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With few answers many steps have none, and a notice has told of the first."""
    display = PlainDisplay(every=10)
    for step in range(7, 13):
        row = step_row(step, loss=float("nan"), tokens=0, skip_reason=NO_LABELS, skipped=True)
        display.step(row, 200)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 10/200  skipped: no token to learn")


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
    assert frames(screen)[-3].startswith("step 4/4  epoch 1.00  256 tokens  ")
    assert frames(screen)[-3].endswith(" 1 min 00 s left")
    numbers = "loss 1.2500  lr 1.00e-03  grad 2.00  640 tokens/s  MFU 25.0%  0.00 GiB"
    assert frames(screen)[-2] == numbers


@pytest.mark.parametrize("width", [26, 36, 60, 80, 100, 200])
def test_nothing_is_cut_or_left_out_however_wide_the_terminal_is(
    step_row: MakeRow, width: int
) -> None:
    display, screen = live(width)
    big = {
        "mfu": 0.4567,
        "total_tokens": 15_123_456_789_012,
        "epoch": 123.456,
        "loss": 12.3456,
        "tokens_per_second": 1_234_567.0,
        "grad_norm": 1234.56,
        "peak_memory_bytes": int(1234.5 * 2**30),
    }
    with display:
        display.step(step_row(123_456, seconds=1e6, seconds_left=3.68e6, **big), 1_000_000)
        display.note(
            "a note of several words, which the terminal must not break within one of its words"
        )
    *_, head, _ = shown = frames(screen)
    assert max(map(len, shown)) <= width
    text = "\n".join(shown)
    fields = ("step 123456/1000000", "loss 12.3456", "lr 1.00e-03", "grad 1234.56")
    fields += ("1,234,567 tokens/s", "MFU 45.7%", "1234.50 GiB", "15.12 T tokens", "epoch 123.46")
    note = ("a note", "several", "words,", "terminal", "must", "break", "within")
    for field in (*fields, "11 d 14 h, 42 d 14 h left", *note):
        assert field in text, (field, text)
    assert ("\u2501" in text) == (width >= 60), head
