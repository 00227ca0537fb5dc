"""Parsing of command lines with tyro, whose errors are reduced from a box to one line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro

from lather.commands.checking import check_values, unknown_options
from lather.commands.options import options_of_command
from lather.config.toml_file import Unknown, describe_unknown
from lather.errors import UserError, require
from lather.lines import fit, screen_width

A = TypeVar("A")

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
MOST_BYTES = 10**18

ONE_OF_SEVERAL = (tyro.conf.AvoidSubcommands,)
"""tyro settings: a field whose type is a union of dataclasses keeps the class of its default, and
its fields become plain options."""

BOX = 80
"""Greatest width of tyro's boxes in columns."""


def parse_arguments(cls: type[A], prog: str, arguments: list[str], default: A | None = None) -> A:
    """Parse `arguments` as the dataclass `cls`; what they leave out comes from `default`.

    Raises UserError, of one line, if they are not valid; SystemExit after printing the help if they
    ask for it.
    """
    if not {"-h", "--help"} & {*arguments}:
        options = list(options_of_command(cls, default))
        if unknown := unknown_options(arguments, options):
            raise UserError(describe_unknown(_with_help(unknown, prog), "option"))
        check_values(arguments, options)
    more: dict[str, Any] = {} if default is None else {"default": default, "config": ONE_OF_SEVERAL}
    parse = functools.partial(tyro.cli, cls, prog=prog, args=arguments, **more)
    page = _Page(sys.stdout)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(page):
            return parse()
    except SystemExit as exit_:
        if exit_.code in (0, None):
            print(page.fitted(), end="")
            raise
    raise UserError(one_line(_box_of(parse), prog))


def _with_help(unknown: list[Unknown], prog: str) -> list[Unknown]:
    """Let a single option of which nothing is known refer to the help."""
    return (
        [(unknown[0][0], unknown[0][1] or f"{prog} --help shows what it takes")]
        if len(unknown) == 1
        else unknown
    )


class _Page(io.StringIO):
    """Keeps the help that tyro prints as if to `screen`: its boxes fit a terminal, and what stands
    before them does not."""

    def __init__(self, screen: Any) -> None:
        super().__init__()
        self._is_terminal, self._encoding = screen.isatty(), screen.encoding

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding or "utf-8"

    def fitted(self) -> str:
        width, lines = screen_width(), self.getvalue().split("\n")
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
        fits = [width is None or len(line) <= width for line in plain]
        return "\n".join(
            line if is_short else fit(bare)
            for line, bare, is_short in zip(lines, plain, fits, strict=True)
        )


def _box_of(parse: Callable[[], object]) -> str:
    """Return the box that tyro draws around an error, at its full width: in a narrower terminal it
    would break long names."""
    columns, boxed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = str(BOX)
    try:
        with contextlib.redirect_stderr(boxed), contextlib.suppress(SystemExit):
            parse()
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return boxed.getvalue()


def one_line(box: str, prog: str) -> str:
    """Return the message of tyro's boxed error.

    A box consists of groups of lines between rules. If the output is not UTF-8 the box is drawn in
    ASCII, and its title is the first group."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [
        line.strip("│ ") for line in plain.splitlines() if line.strip() and line[0] not in "╭╰"
    ]
    groups: list[list[str]] = [[]]
    for line in lines:
        if set(line) <= {"─", "-"}:
            groups.append([])
        else:
            groups[-1].append(line)
    message, *rest = groups if box.startswith("╭") else groups[1:] or [[]]
    text = " ".join(message)
    is_of_tyro = any(group and group[0].startswith("Argument helptext") for group in rest)
    checked = re.sub(r"^Error parsing [\w.-]+: ", "", text)
    if checked != text and not is_of_tyro:
        return checked  # a dataclass's own check has named the field
    text = re.sub(r"^Unrecognized options?: (.*)$", r"no option takes this: \1", text)
    return f"{text}; {prog} --help shows what it takes"


def parse_size(text: str, option: str, *, unit: bool = False) -> int:
    """Return the bytes of a size such as 5GB; with `unit`, a number without a unit is refused.
    Raises UserError if `text` is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B?)", text.strip(), re.IGNORECASE)
    num_bytes = (
        float(match[1]) * UNITS.get(match[2].upper(), 0) if match and (match[2] or not unit) else 0
    )
    constraint = "a size such as 500MB, 5GB or 4GiB, at least 1 byte and at most 10^18"
    if unit and match and not match[2]:
        constraint = f"with a unit, such as {text.strip()}GiB"
    require(
        1 <= num_bytes <= MOST_BYTES,
        option,
        text if len(text) <= 40 else f"{text[:40]}...",
        constraint,
    )
    return int(num_bytes)
