"""Short names for several runs in one picture: what all paths have in common is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

LONGEST = 36
"""Characters of a name in a picture."""
LEAST_PREFIX = 6
"""Characters that names must have in common at their beginning to be left out."""
DOTS = "\N{HORIZONTAL ELLIPSIS}"


def short_names(run_dirs: Sequence[Path]) -> tuple[list[str], str]:
    """Return a name for each run, different ones for different folders as far as their length
    allows, and the beginning that all names had in common and that was left out ("" if there is
    none)."""
    if len(run_dirs) < 2:
        return [_shortened(path.name or path.resolve().name) for path in run_dirs], ""
    names = _different_parts([path.resolve().parts for path in run_dirs])
    columns = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
    prefix = re.match(r"(.*[-_./ ])?", "".join(letters[0] for letters in columns))
    common = prefix[0] if prefix and len(prefix[0]) >= LEAST_PREFIX and len({*names}) > 1 else ""
    if common in names:
        common = ""
    return [_shortened(DOTS * bool(common) + name[len(common) :]) for name in names], _shortened(
        common
    )


def _different_parts(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return each path without the first and the last parts that are the same in all, but with at
    least one."""
    if len({*paths}) == 1:
        return [parts[-1] for parts in paths]
    first, last = 0, 0
    least = min(map(len, paths)) - 1
    while first < least and len({parts[first] for parts in paths}) == 1:
        first += 1
    while last < least - first and len({parts[len(parts) - 1 - last] for parts in paths}) == 1:
        last += 1
    return ["/".join(parts[first : len(parts) - last]) for parts in paths]


def _shortened(name: str) -> str:
    """Leave out the middle of a long name: its end says most."""
    if len(name) <= LONGEST:
        return name
    begin = LONGEST // 3
    return f"{name[:begin]}{DOTS}{name[begin + 1 - LONGEST :]}"
