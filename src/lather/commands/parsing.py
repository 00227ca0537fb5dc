"""Command lines: the options of a command, found from the dataclass that they are parsed as, and parsing with tyro, whose errors are
reduced from a box to one line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

import tyro

from lather.config.nearest import nearest_names
from lather.config.rule_fields import metavar
from lather.errors import UserError, require
from lather.lines import fit, screen_width
from lather.optim.options import documentation_of

A = TypeVar("A")

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MOST_BYTES = 10**18

ONE_OF_SEVERAL = (tyro.conf.AvoidSubcommands,)
"""tyro settings: a field whose type is a union of dataclasses keeps the class of its default, and its fields become plain options."""

BOX = 80
"""Greatest width of tyro's boxes in columns."""

SAID = ("name", "help", "help_behavior_hint")
"""Properties of a field that `tyro.conf.arg` may give."""


@dataclass(frozen=True)
class CommandOption:
    """An option of a command."""

    name: str
    """Dotted, as in TOML."""
    hint: Any
    """Type."""
    default: str
    """Where it is not given, in words; empty: nothing."""
    text: str
    """Description in `--help`."""

    @property
    def flags(self) -> list[str]:
        """How it is written: --a.b-c, and --a.no-b-c of a switch."""
        section, dot, last = self.name.replace("_", "-").rpartition(".")
        return [f"--{section}{dot}{no}{last}" for no in (("", "no-") if self.hint is bool else ("",))]

    @property
    def metavar(self) -> str:
        """The word that stands for its value; empty for a switch."""
        return "" if self.hint is bool else metavar(self.hint)

    @property
    def choices(self) -> list[str]:
        """The values that it can have; none: any of its type."""
        return [str(value) for value in _literals(self.hint) if value is not None]


def options_of_command(cls: type, default: object = None, prefix: str = "") -> Iterator[CommandOption]:
    """The options of a dataclass of arguments, without positional ones; `default`: an instance, whose sections may be of classes of their
    own."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), documentation_of(cls)
    for one in fields(cls):
        marks = getattr(hints[one.name], "__metadata__", ())  # what `Annotated` and tyro say of a type
        hint = hints[one.name].__origin__ if marks else hints[one.name]
        value = getattr(default, one.name) if default is not None else None if one.default is MISSING else one.default
        section = type(value) if is_dataclass(value) else hint
        says = {key: said for key in SAID for mark in marks if (said := getattr(mark, key, None)) is not None}
        if is_dataclass(section):
            inner = prefix if says.get("name") == "" else f"{prefix}{one.name}."
            yield from options_of_command(typing.cast(type, section), value, inner)
        elif not {tyro.conf.Positional, tyro.conf.Suppress} & {*marks} and not any(map(is_dataclass, typing.get_args(hint))):
            values = value if isinstance(value, tuple) else () if value is None or value is False else (value,)
            shown = says.get("help_behavior_hint", "").removeprefix("(default: ").removesuffix(")") or " ".join(map(str, values))
            yield CommandOption(prefix + one.name, hint, shown, says.get("help") or texts.get(one.name, ""))


def _literals(hint: Any) -> Iterator[object]:
    """The values of `Literal` in a type, also within a union or a tuple."""
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is Literal:
            yield part
        else:
            yield from _literals(part)


def parse_arguments(cls: type[A], prog: str, arguments: list[str], default: A | None = None) -> A:
    """Parse `arguments` as the dataclass `cls`; what they leave out comes from `default`.

    Raises UserError, of one line, if they are not valid; SystemExit after printing the help if they ask for it.
    """
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
    raise UserError(_with_nearest_names(one_line(_box_of(parse), prog), cls, default))


class _Page(io.StringIO):
    """Keeps the help that tyro prints as if to `screen`: its boxes fit a terminal, and what stands before them does not."""

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
        return "\n".join(line if is_short else fit(bare) for line, bare, is_short in zip(lines, plain, fits, strict=True))


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


def _with_nearest_names(message: str, cls: type, default: object) -> str:
    """The message that an option is unknown, with the options that may be meant in place of the one that is spelled most like it."""
    unknown = re.match(r"Unrecognized options?: --([^\s,;=]+)", message)
    if unknown is None:
        return message
    options = {option.name: option.flags[0] for option in options_of_command(cls, default)}
    names = nearest_names(unknown[1].replace("-", "_"), options)
    return f"{message.partition('; ')[0]}; did you mean {' or '.join(options[name] for name in names)}?" if names else message


def one_line(box: str, prog: str) -> str:
    """Return the message of tyro's boxed error, and the first option that it suggests.

    A box consists of groups of lines between rules. If the output is not UTF-8 the box is drawn in ASCII, and its title is the first group.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ") for line in plain.splitlines() if line.strip() and line[0] not in "╭╰"]
    groups: list[list[str]] = [[]]
    for line in lines:
        if set(line) <= {"─", "-"}:
            groups.append([])
        else:
            groups[-1].append(line)
    message, *rest = groups if box.startswith("╭") else groups[1:] or [[]]
    text = " ".join(message)
    if not any(group and group[0].startswith("Argument helptext") for group in rest):  # a dataclass's own check has named the field
        text = re.sub(r"^Error parsing [\w.-]+: ", "", text)
    if rest and rest[0][0].startswith("Perhaps you meant") and len(rest[0]) > 1:
        text += f"; did you mean {rest[0][1].split()[0]}?"
    elif "is not valid" not in text:
        text += f"; {prog} --help shows what it takes"
    return text


def parse_size(text: str, option: str, *, unit: bool = False) -> int:
    """Return the bytes of a size such as 5GB; with `unit`, a number without a unit is refused. Raises UserError if `text` is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B?)", text.strip(), re.IGNORECASE)
    num_bytes = float(match[1]) * UNITS.get(match[2].upper(), 0) if match and (match[2] or not unit) else 0
    constraint = "a size such as 500MB, 5GB or 4GiB, at least 1 byte and at most 10^18"
    require(1 <= num_bytes <= MOST_BYTES, option, text if len(text) <= 40 else f"{text[:40]}...", constraint)
    return int(num_bytes)
