"""The one conversion of names and values to the fields of dataclasses, for TOML and for command
lines.

Both give mappings of names to values, with a mapping for each section. A value of TOML has the type
that it has there; a value of a command line is a `Word`, or a list of them, which is read as
whatever the field's type is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from lather.argument import Argument
from lather.config.optim import DEFAULT_RULE, OptimConfig, chosen_rules, optim_class
from lather.config.rule_fields import UNIONS
from lather.errors import ConfigError, as_toml, require

C = TypeVar("C")

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
}
PLAIN_ARGUMENT = Argument()


class Word(str):
    """A word of a command line, which may stand for a value of any type."""

    option: str
    """The option that it follows, as it was written."""

    def __new__(cls, text: str, option: str) -> Word:
        word = super().__new__(cls, text)
        word.option = option
        return word


@functools.cache
def types_of(cls: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def arguments_of(cls: type) -> Mapping[str, Argument]:
    """Return the marks of a dataclass's fields by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        field.name: next(
            (mark for mark in marks[field.name] if isinstance(mark, Argument)), PLAIN_ARGUMENT
        )
        for field in dataclasses.fields(cls)
    }


def sections_of(hint: Any) -> list[type]:
    """Return the dataclasses that a field of this type may hold; none if it is a plain value."""
    if hint is OptimConfig:
        return [optim_class((("", DEFAULT_RULE),))]
    return [
        part
        for part in typing.get_args(hint) or (hint,)
        if isinstance(part, type) and dataclasses.is_dataclass(part)
    ]


def section_class(sections: list[type], mapping: Mapping[str, Any], name: str) -> type:
    """Return the class of a section: for `[optim]` by its rules, for `[model]` by its
    `model_type`."""
    if issubclass(sections[0], OptimConfig):
        return optim_class(chosen_rules(mapping))
    if len(sections) == 1:
        return sections[0]
    by_type = {getattr(section, "model_type", ""): section for section in sections}
    model_type = mapping.get("model_type", next(iter(by_type)))
    require(
        model_type in list(by_type),
        f"{name}.model_type",
        model_type,
        f"one of {', '.join(map(repr, by_type))}",
    )
    return by_type[model_type]


def field_names(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, without the sections themselves."""
    for name, hint in types_of(cls).items():
        if sections := sections_of(hint):
            yield from dict.fromkeys(
                key for section in sections for key in field_names(section, f"{prefix}{name}.")
            )
        else:
            yield f"{prefix}{name}"


def merged(mapping: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the values of dotted names in place of its own. A value in the place of
    a section stays, for its own message."""
    whole = dict(mapping)
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        inner = whole.get(first, {})
        if not dot:
            whole[first] = value
        elif isinstance(inner, Mapping):
            whole[first] = merged(inner, {rest: value})
    return whole


def build(cls: type[C], mapping: Mapping[str, Any], prefix: str = "") -> C:
    """Build a dataclass from the keys of a mapping that are its fields. Raises ConfigError for a
    value that is not of its field's type."""
    values: dict[str, Any] = {}
    arguments = arguments_of(cls)  # type: ignore[arg-type]  # a type variable, which mypy does not
    for name, hint in types_of(cls).items():  # type: ignore[arg-type]  # know to be hashable
        key, sections = f"{prefix}{name}", sections_of(hint)
        if sections and arguments[name].inline:
            values[name] = build(sections[0], mapping, prefix)
        elif name in mapping and sections:
            value = mapping[name]
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{key} = {as_toml(value)} is not valid: it must be a section, [{key}]"
                )
            values[name] = build(section_class(sections, value, key), value, f"{key}.")
        elif name in mapping:
            values[name] = convert(mapping[name], hint, key)
    return cls(**values)


def convert(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to the field's type. Of TOML, only an int to a float is converted. Raises
    ConfigError for any other mismatch."""
    parts = [part for part in union_parts(hint) if part is not types.NoneType]
    if isinstance(value, Word) and value == "None" and len(parts) < len(union_parts(hint)):
        return None
    if len(parts) > 1:
        for part in parts:
            with contextlib.suppress(ConfigError):
                return convert(value, part, name)
        raise _refusal(value, hint, name)
    (part,), origin, args = parts, typing.get_origin(parts[0]), typing.get_args(parts[0])
    if origin is dict and isinstance(value, dict):
        return {key: convert(item, args[1], f"{name}.{key}") for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(value) == len(hints):
            return tuple(convert(item, part, name) for item, part in zip(value, hints, strict=True))
    return _convert_single(value, part, name)


def _convert_single(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to a type that is neither a union nor made of others."""
    if typing.get_origin(hint) is Literal:
        for choice in typing.get_args(hint):
            if value == (str(choice) if isinstance(value, Word) else choice):
                return choice
    elif isinstance(value, Word) and hint in WORDS:
        with contextlib.suppress(ValueError):
            return _read(value, hint)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) <= sys.float_info.max, name, value, "a number that a float can hold")
        return float(value)
    elif type(value) is hint:
        return value
    raise _refusal(value, hint, name)


def _read(word: Word, cls: Any) -> Any:
    """Read a word as a value of a type. Raises ValueError if it is none."""
    if cls is bool:
        if word.lower() not in ("true", "false"):
            raise ValueError(word)
        return word.lower() == "true"
    return str(word) if cls is str else cls(word)


def _refusal(value: Any, hint: Any, name: str) -> ConfigError:
    written = value.option if isinstance(value, Word) else name
    return ConfigError(
        f"{written} = {as_toml(value)} is not valid: it must be {values_of(hint, name)}"
    )


def values_of(hint: Any, name: str = "") -> str:
    """Say which values a type has."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(values_of(part, name) for part in args if part is not types.NoneType)
    if origin is Literal:
        return f"one of {', '.join(map(as_toml, args))}"
    if origin is tuple:
        return "a list" if args[-1] is Ellipsis else f"a list of {len(args)} numbers"
    return f"a section, [{name}]" if origin is dict else WORDS[hint]


def union_parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; of any other type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
