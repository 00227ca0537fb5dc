"""Checks of a command line before it is parsed: options that there are not, all of them at once,
and values that are not of an option's type."""

from __future__ import annotations

import contextlib
import itertools
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from lather.commands.options import CommandOption
from lather.config.nearest import hint_of
from lather.config.rule_fields import UNIONS
from lather.config.toml_file import Unknown
from lather.errors import UserError, as_toml, require

WORDS: dict[Any, str] = {bool: "True or False", int: "an integer", float: "a number"}
SWITCH_VALUES = {"true", "false", "yes", "no", "on", "off", "1", "0"}
"""Words after a switch that cannot be meant for anything else."""


def options_of_line(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the options of a command line, as they are written, each with the values that
    follow."""
    places = [place for place, one in enumerate(arguments) if one.startswith("--")]
    for start, end in itertools.pairwise([*places, len(arguments)]):
        name, equals, value = arguments[start].partition("=")
        yield name, [*([value] if equals else []), *arguments[start + 1 : end]]


def unknown_options(arguments: Sequence[str], options: Sequence[CommandOption]) -> list[Unknown]:
    """Return the options of a command line that there are not, each with a hint, which may be
    empty."""
    flags = {flag for option in options for flag in option.flags} | {"--help"}
    by_name = {option.name: option.flags[0] for option in options}
    unknown = {}
    for written, _ in options_of_line(arguments):
        if written.replace("_", "-") not in flags and written != "--":
            name = written.removeprefix("--").replace("-", "_")
            fields = [one for one in by_name if one.startswith(f"{name}.")]
            text = hint_of(name, by_name, by_name.__getitem__)
            if fields:
                text = f"it is a section: give its fields, such as {by_name[fields[0]]}"
            unknown[written] = text
    return list(unknown.items())


def check_values(arguments: Sequence[str], options: Sequence[CommandOption]) -> None:
    """Raise UserError for the first option whose value is missing, or not of its type."""
    by_flag = {flag: option for option in options for flag in option.flags}
    for written, values in options_of_line(arguments):
        option = by_flag.get(written.replace("_", "-"))
        if option is not None:
            _check(written, values, option)


def _check(written: str, values: Sequence[str], option: CommandOption) -> None:
    if option.hint is bool:
        if values and values[0].lower() in SWITCH_VALUES:
            either = " or ".join(option.flags)
            raise UserError(f"{written} {values[0]}: a switch takes no value: give {either}")
        return
    form = option.hint
    without_none = [part for part in _parts(form) if part is not types.NoneType]
    if (
        len(without_none) == 1
        and typing.get_origin(without_none[0]) is tuple
        and values != ["None"]
    ):
        form = without_none[0]
    if typing.get_origin(form) is tuple and typing.get_args(form)[-1:] != (Ellipsis,):
        of_each, count = typing.get_args(form)[0], len(typing.get_args(form))
    elif typing.get_origin(form) is tuple:
        of_each, count = typing.get_args(form)[0], len(values)
    else:
        of_each, count = form, 1
    if option.name == "data.path" and not values:  # no folder at all would mean `data.source`
        raise UserError(
            f"{written} needs at least one folder of a data set; leave it out for --data.source"
        )
    words = _words(of_each) or "a value"
    if len(values) < count:
        needs = f"needs {count} values, each of them {words}" if count > 1 else f"needs {words}"
        raise UserError(f"{written} {needs}")
    for value in values[:count]:
        fits = any(fits(value) for fits in _tests(of_each))
        require(fits, written, value, words)


def _parts(form: Any) -> list[Any]:
    is_union = typing.get_origin(form) in UNIONS
    return list(typing.get_args(form)) if is_union else [form]


def _words(form: Any) -> str:
    """Say which values a type has; empty: all texts are."""
    choices = [as_toml(one) for part in _parts(form) for one in _choices(part)]
    words = [WORDS[part] for part in _parts(form) if part in WORDS]
    words += [f"one of {', '.join(choices)}"] if choices else []
    return " or ".join(words)


def _choices(part: Any) -> Sequence[Any]:
    return typing.get_args(part) if typing.get_origin(part) is Literal else ()


def _tests(form: Any) -> Iterator[Callable[[str], bool]]:
    """Yield tests of a text, of which a value of this type passes at least one. Types that are not
    tested here accept every text; the parser tests them."""
    for part in _parts(form):
        if part is types.NoneType:
            yield lambda text: text == "None"
        elif part is bool:
            yield lambda text: text in ("True", "False")
        elif part in WORDS:
            yield lambda text, part=part: _converts(text, part)  # type: ignore[misc]
        elif typing.get_origin(part) is Literal:
            yield lambda text, part=part: text in map(str, _choices(part))  # type: ignore[misc]
        else:
            yield lambda text: True


def _converts(text: str, cls: Callable[[str], object]) -> bool:
    with contextlib.suppress(ValueError):
        cls(text)
        return True
    return False
