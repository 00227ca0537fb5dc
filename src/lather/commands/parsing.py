"""Parsing of command lines: `read_line` divides the words at their options, `values_of_line` makes
them values of dotted names, and `lather.config.fields.build` makes these a dataclass."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lather.commands.help import show_arguments
from lather.commands.options import MANY, CommandOption, options_of_command
from lather.config.fields import Word, build, merged, union_parts, values_of
from lather.config.rule_fields import check_ranges
from lather.config.suggestions import suggestion
from lather.config.toml_file import describe_unknown
from lather.errors import UserError, require

A = TypeVar("A")
Line = Sequence[tuple[str, list[str]]]
"""The options of a command line, as they are written, each with the words that follow; the words
before the first option, and those after `--`, follow the option ""."""

MOST_BYTES = 10**18
SWITCH_VALUES = {"true", "false", "yes", "no", "on", "off", "1", "0"}
"""Words after a switch that cannot be meant for anything else."""


def parse_arguments(cls: type[A], prog: str, arguments: Sequence[str]) -> A:
    """Parse `arguments` as the dataclass `cls`.

    Raises UserError, of one line, if they are not valid; SystemExit after printing the help if they
    ask for it.
    """
    options = list(options_of_command(cls))
    if {"-h", "--help"} & {*arguments}:
        show_arguments(prog, cls, options)
        raise SystemExit(0)
    line = read_line(arguments)
    if unknown := unknown_options(line, options):
        if len(unknown) == 1 and not unknown[0][1]:
            unknown = [(unknown[0][0], f"{prog} --help shows what it takes")]
        raise UserError(describe_unknown(unknown, "option"))
    parsed = build(cls, merged({}, values_of_line(line, options, prog)))
    check_ranges(parsed, "--")
    return parsed


def read_line(arguments: Sequence[str]) -> Line:
    """Divide a command line at its options."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    line: list[tuple[str, list[str]]] = [("", [])]
    for word in arguments[:end]:
        if word.startswith("--") or word == "-h":
            name, equals, value = word.replace("-h", "--help", word == "-h").partition("=")
            line.append((name, [value] if equals else []))
        else:
            line[-1][1].append(word)
    return [*line, ("", [*arguments[end + 1 :]])]


def name_of_option(option: str) -> str:
    """Return the dotted name of the field that an option gives: `data.packed_attention` for
    --data.no-packed-attention."""
    section, dot, last = option.removeprefix("--").replace("-", "_").rpartition(".")
    return f"{section}{dot}{last.removeprefix('no_')}"


def unknown_options(line: Line, options: Sequence[CommandOption]) -> list[tuple[str, str]]:
    """Return the options of a command line that the command lacks, as they are written, each with a
    hint, which may be empty."""
    flags = {flag for option in options for flag in option.flags}
    by_name = {option.name: option.flags[0] for option in options if option.flags}
    maybe = {option.name for option in options if bool in union_parts(option.hint)}
    unknown = {}
    for written, _ in line:
        if written and written.replace("_", "-") not in flags:
            name = written.removeprefix("--").replace("-", "_")
            inside = [by_name[field] for field in by_name if field.startswith(f"{name}.")]
            if inside:
                unknown[written] = f"it is a section: give its fields, such as {inside[0]}"
            elif (positive := name_of_option(written)) in maybe:
                unknown[written] = f"give {by_name[positive]} false"
            else:
                unknown[written] = suggestion(name, by_name, by_name.__getitem__)
    return list(unknown.items())


def values_of_line(line: Line, options: Sequence[CommandOption], prog: str) -> dict[str, Any]:
    """Return the values of a command line by dotted name. Raises UserError for an option that lacks
    its value, for words that no option takes, and for arguments that are missing."""
    by_flag = {flag: option for option in options for flag in option.flags}
    values: dict[str, Any] = {}
    words: Sequence[str] = []
    for written, following in line:
        option = by_flag.get(written.replace("_", "-"))
        if option is None:
            words = [*words, *following]
            continue
        value, rest = _take(written, following, option)
        if option.argument.repeated:
            value = [*values.get(option.name, []), value]
        values[option.name] = value
        words = [*words, *rest]
    for option in options:
        if option.argument.positional and words:
            values[option.name], words = _take("", words, option)
    help_shows = f"{prog} --help shows what it takes"
    if words:
        raise UserError(f"no option takes this: {' '.join(words)}; {help_shows}")
    lacking = [option for option in options if option.is_required and option.name not in values]
    if lacking:
        names = " and ".join(next(iter(option.flags), option.metavar) for option in lacking)
        more = f"is missing: {lacking[0].text.rstrip('.')}" if len(lacking) == 1 else "are missing"
        raise UserError(f"{names} {more}; {help_shows}")
    return values


def _take(
    written: str, following: Sequence[str], option: CommandOption
) -> tuple[Any, Sequence[str]]:
    """Return the value of an option, and the words that follow it."""
    if option.hint is bool:
        if following and following[0].lower() in SWITCH_VALUES:
            either = " or ".join(option.flags)
            raise UserError(f"{written} {following[0]}: a switch takes no value: give {either}")
        return written.replace("_", "-") == option.flags[0], following
    hint, count = option.words
    words = [Word(word, written or option.metavar) for word in following]
    if words[:1] == ["None"] and types.NoneType in union_parts(option.hint):
        return words[0], following[1:]
    if option.name == "data.path" and not words:  # no folder at all would mean `data.source`
        raise UserError(
            f"{written} needs at least one folder of a data set; leave it out for --data.source"
        )
    if typing.get_origin(option.hint) is dict:
        if len(words) % 2:
            raise UserError(f"{written} needs pairs of a name and a value; the last has no value")
        return dict(zip(map(str, words[::2]), words[1::2], strict=True)), []
    number = min(len(words), count or 1)
    if number < (count or 1) != MANY:
        each = values_of(hint)
        needs = f"{count} values, each of them {each}" if count else each
        raise UserError(f"{written} needs {needs}")
    return words[:number] if count else words[0], following[number:]


def check_writable(*files: Path | None) -> None:
    """Raise UserError, before a long computation, for a file that cannot be written."""
    for path in filter(None, files):
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise UserError(f"{path}: cannot be written: name a file in a folder that exists")


def parse_size(text: str, option: str, *, unit: bool = False) -> int:
    """Return the bytes of a size such as 5GB; with `unit`, a number without a unit is refused.
    Raises UserError if `text` is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:([KMG])(I?))?B)?", text.strip().upper())
    num_bytes = float(match[1]) if match else 0
    if match and match[3]:
        num_bytes *= (1024 if match[4] else 1000) ** " KMG".index(match[3])
    constraint = "a size such as 500MB, 5GB or 4GiB, at least 1 byte and at most 10^18"
    if unit and match and not match[2]:
        num_bytes, constraint = 0, f"with a unit, such as {text.strip()}GiB"
    require(1 <= num_bytes <= MOST_BYTES, option, text, constraint)
    return int(num_bytes)
