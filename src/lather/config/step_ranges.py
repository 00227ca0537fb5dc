"""Steps and ranges of steps as text: "120:140 300" means the steps 120 to 140, both included, and
step 300."""

from __future__ import annotations

from typing import Annotated

from lather.optim.options import Range


def step_ranges(text: str) -> list[range]:
    """Return the ranges of steps that a text names. Raises ValueError if it is not valid."""
    ranges = []
    for part in text.split():
        first, colon, last = part.partition(":")
        numbers = [first, last if colon else first]
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise ValueError(f"{part!r} is not a step or a range of steps")
        start, stop = map(int, numbers)
        if not 1 <= start <= stop:
            raise ValueError(f"{part!r} is not a range of steps")
        ranges.append(range(start, stop + 1))
    return ranges


def with_range(text: str, first: int, last: int) -> str:
    """Return the text of these steps and of `first` to `last`, which take the place of ranges
    within them."""
    kept = [
        part
        for part in text.split()
        for steps in step_ranges(part)
        if not first <= steps[0] <= steps[-1] <= last
    ]
    return " ".join([*kept, f"{first}:{last}"])


def _is_valid(text: object) -> bool:
    try:
        return isinstance(text, str) and step_ranges(text) is not None
    except ValueError:
        return False


StepRanges = Annotated[
    str,
    Range(
        "steps, counted from 1, and ranges of steps with their last one, such as '120:140 300'",
        _is_valid,
    ),
]
