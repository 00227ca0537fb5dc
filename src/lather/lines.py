"""Lines of text that fit the terminal: broken between words there, and whole in a file or pipe; and
numbers that fit a line."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable

RULE = 80
"""Greatest width of a line across the screen."""


def screen_width() -> int | None:
    """Return the columns of the terminal that standard output is, None for a file or a pipe."""
    try:
        is_terminal = sys.stdout.isatty()
    except ValueError:  # it is closed
        is_terminal = False
    return shutil.get_terminal_size().columns if is_terminal else None


def fit(text: str, width: int | None = None) -> str:
    """Break lines that are wider than the screen between words. A further line begins below the
    first word after a gap of two spaces or more, where a line has such columns, and else below the
    first word.

    A word that is itself too wide, such as a path, stays whole. `width`: columns; None: those of
    the screen.
    """
    width = screen_width() if width is None else width
    return text if width is None else "\n".join(_broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    begin = re.match(r" *", line)
    columns = re.match(r" *\S+( \S+)* {2,}", line)
    assert begin is not None
    indent = len(columns[0]) if columns and len(columns[0]) <= 2 * width // 3 else 2 * len(begin[0])
    lines = textwrap.wrap(
        line.strip(),
        width,
        initial_indent=begin[0],
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def flow(fields: Iterable[str], width: int) -> list[str]:
    """Put fields on as few lines as they need, two spaces apart, each field whole."""
    lines: list[str] = []
    for text in fields:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines.append(text)
    return lines


def short_number(number: int) -> str:
    """Return a whole number as it is read at a glance: 98,304, then 1.23 M, B and T."""
    units = (("T", 10**12), ("B", 10**9), ("M", 10**6))
    unit = next(((name, size) for name, size in units if number >= size), None)
    return f"{number:,}" if unit is None else f"{number / unit[1]:,.2f} {unit[0]}"


def rule(title: str = "") -> str:
    """Return a line across the screen, of at most `RULE` columns, that may begin with a title."""
    width = min(RULE, screen_width() or RULE)
    return f"--- {title} ".ljust(width, "-") if title else "-" * width
