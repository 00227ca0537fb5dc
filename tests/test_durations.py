"""Lengths of time have one form, and round to their smaller unit without ever showing 60 of it."""

import pytest

from lather.durations import duration, spent_and_left, unit_of_axis

TEXTS = {
    **{0: "0 s", 2.5e-6: "2 \N{MICRO SIGN}s", 0.00123: "1.23 ms", 0.25: "250 ms", 0.9996: "1 s"},
    **{1.26: "1.3 s", 7: "7 s", 42.4: "42 s", 59.4: "59 s", 59.6: "1 min 00 s", 60: "1 min 00 s"},
    **{282: "4 min 42 s", 3599.4: "59 min 59 s", 3599.6: "1 h 00 min", 3720: "1 h 02 min"},
    **{86369: "23 h 59 min", 86399: "1 d 00 h", 273_600: "3 d 04 h", 1e8: "1,157 d 10 h"},
}


@pytest.mark.parametrize("seconds", TEXTS)
def test_the_form(seconds: float) -> None:
    assert duration(seconds) == TEXTS[seconds]


def test_bars_and_logs_show_whole_seconds() -> None:
    assert spent_and_left(4.26, None) == "4 s"
    assert spent_and_left(61.7, 0.2) == "1 min 02 s, 0 s left"


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(0.5, ("s", 1)), (179, ("s", 1)), (180, ("min", 60)), (9e4, ("h", 3600)), (1e6, ("d", 86400))],
)
def test_axes_have_small_numbers(seconds: float, unit: tuple[str, int]) -> None:
    assert unit_of_axis(seconds) == unit
