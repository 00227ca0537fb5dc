"""Lengths of time as bars, logs, messages, tables and pages show them: 12.3 ms, 7 s, 4 min 42 s,
1 h 02 min, 3 d 04 h."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60, 3600, 86400
"""Seconds."""


def duration(seconds: float) -> str:
    """Return a length of time in its largest unit or two, rounded to the smaller of them."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} \N{MICRO SIGN}s" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < MINUTE - 0.5:
        return f"{seconds:.2g} s"
    for large, small, most, names in (
        (MINUTE, 1, HOUR, ("min", "s")),
        (HOUR, MINUTE, DAY, ("h", "min")),
    ):
        count = round(seconds / small)
        if count * small < most:
            whole, rest = divmod(count, large // small)
            return f"{whole} {names[0]} {rest:02d} {names[1]}"
    days, hours = divmod(round(seconds / HOUR), 24)
    return f"{days:,} d {hours:02d} h"


def unit_of_axis(seconds: float) -> tuple[str, int]:
    """Return the unit in which an axis that reaches so far has small numbers, and its seconds."""
    units = (("d", DAY), ("h", HOUR), ("min", MINUTE))
    return next(((name, size) for name, size in units if seconds >= 3 * size), ("s", 1))


def spent_and_left(spent: float, left: float | None) -> str:
    """Return the time spent and the time left in whole seconds, as bars and logs show them; None:
    not known yet."""
    texts = [duration(max(0, round(seconds))) for seconds in (spent, left) if seconds is not None]
    return texts[0] if left is None else f"{texts[0]}, {texts[1]} left"
