"""The conversion of names and values to the fields of dataclasses, the same for TOML and for
command lines.

Both give mappings of names to values, with a mapping for each section. A value of TOML has the type
that it has there; a value of a command line is a `Word`, or a list of them, and is read as
whatever the field's type is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from lather.argument import Argument
from lather.config.optim import OptimConfig, optim_class
from lather.config.rule_fields import UNIONS, cached_by_class, search_current_folder
from lather.config.rule_names import chosen_rules
from lather.errors import ConfigError, as_toml, require
from lather.models.families import DEFAULT_FAMILY, FAMILIES, ModelConfig, find_family
from lather.models.family import Family

C = TypeVar("C")

READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", lambda word: {"true": True, "false": False}[word.lower()]),
    int: ("an integer", int),
    float: ("a number", float),
    str: ("a string", str),
    Path: ("a path", Path),
}
"""Type of a value -> its name in messages, and the function that reads it from a word."""


class Word(str):
    """A word of a command line, which may stand for a value of any type."""

    option: str
    """The option that it follows, as it is written."""

    def __new__(cls, text: str, option: str) -> Word:
        word = super().__new__(cls, text)
        word.option = option
        return word


class Field(NamedTuple):
    """A field of a dataclass."""

    hint: Any
    """Type of its value."""
    argument: Argument
    default: Any
    """Value where it is not given; MISSING: it has to be given."""
    sections: tuple[type, ...]
    """Dataclasses that it may hold, besides those of modules that `model_type` names; none if it is
    a plain value."""

    def section(self, mapping: Mapping[str, Any], key: str) -> type:
        """Return the dataclass for the values of a section: that of the rules of `[optim]`, or of
        the family that `model_type` names."""
        if issubclass(self.sections[0], OptimConfig):
            return optim_class(chosen_rules(mapping))
        if issubclass(self.sections[0], ModelConfig):
            return family_named(
                mapping.get("model_type", DEFAULT_FAMILY), f"{key}.model_type"
            ).config
        return self.sections[0]


def family_named(model_type: Any, key: str) -> Family:
    """Return the family with this `model_type`, or `module:FAMILY` (the current folder is searched
    too). Raises ConfigError, naming `key`, if there is none."""
    require(isinstance(model_type, str), key, model_type, "a string")
    if ":" in model_type:
        search_current_folder()
    return find_family(model_type, key)


@cached_by_class
def fields_of(cls: type) -> Mapping[str, Field]:
    """Return the fields of a dataclass by name, those of its constructor's keywords last."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: _field(
            hints[field.name], None if field.default_factory is not MISSING else field.default
        )
        for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))
    }


def _field(hint: Any, default: Any) -> Field:
    marks = getattr(hint, "__metadata__", ())
    argument = next((mark for mark in marks if isinstance(mark, Argument)), Argument())
    hint = typing.get_args(hint)[0] if marks else hint
    parts = typing.get_args(hint) or (hint,)
    classes = (part for part in parts if isinstance(part, type))
    sections = tuple(filter(dataclasses.is_dataclass, classes))
    if hint is OptimConfig:
        sections = (optim_class(chosen_rules({})),)
    if hint is ModelConfig:
        sections = tuple(family.config for family in FAMILIES.values())
    return Field(hint, argument, default, sections)


def field_names(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, without the sections themselves."""
    for name, field in fields_of(cls).items():
        if field.sections:
            inner = (field_names(section, f"{prefix}{name}.") for section in field.sections)
            yield from dict.fromkeys(key for keys in inner for key in keys)
        else:
            yield f"{prefix}{name}"


def section_at(cls: type, name: str, mapping: Mapping[str, Any]) -> type | None:
    """Return the dataclass of the section with this dotted name in a `cls` with these values; None
    if there is no such section."""
    first, _, rest = name.partition(".")
    field, inner = fields_of(cls).get(first), mapping.get(first)
    if field is None or not field.sections:
        return None
    inner = inner if isinstance(inner, Mapping) else {}
    section = field.section(inner, first)
    return section_at(section, rest, inner) if rest else section


def merged(mapping: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in which the values of dotted names replace others. A value in the place of
    a section stays, so that `build` refuses it."""
    whole = dict(mapping)
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        inner = whole.get(first, {})
        if not dot:
            whole[first] = value
        elif isinstance(inner, Mapping):
            whole[first] = merged(inner, {rest: value})
    return whole


def without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping without the value of a dotted name."""
    first, dot, rest = name.partition(".")
    inner = mapping.get(first)
    if dot and isinstance(inner, Mapping):
        return {**mapping, first: without(inner, rest)}
    return {key: value for key, value in mapping.items() if key != name}


def build(cls: type[C], mapping: Mapping[str, Any], prefix: str = "") -> C:
    """Build a dataclass from the keys of a mapping that are its fields. Raises ConfigError for a
    value that is not of its field's type."""
    values: dict[str, Any] = {}
    for name, field in fields_of(cls).items():
        key = f"{prefix}{name}"
        if field.argument.inline:
            values[name] = build(field.sections[0], mapping, prefix)
        elif name in mapping and field.sections:
            section = mapping[name]
            require(isinstance(section, Mapping), key, section, f"a section, [{key}]")
            values[name] = build(field.section(section, key), section, f"{key}.")
        elif name in mapping:
            values[name] = convert(mapping[name], field.hint, key)
    return cls(**values)


def convert(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to the field's type. Of TOML, only an int to a float is converted. Raises
    ConfigError for any other mismatch."""
    # None first: as a word it is a string, too
    for part in sorted(union_parts(hint), key=lambda part: part is not types.NoneType):
        with contextlib.suppress(ValueError, KeyError, OverflowError, TypeError):
            return _as_type(value, part)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        for item in value:  # the first that does not fit
            convert(item, typing.get_args(hint)[0], name)
    written = value.option if isinstance(value, Word) else name
    raise ConfigError(
        f"{written} = {as_toml(value)} is not valid: it must be {values_of(hint, name)}"
    )


def _as_type(value: Any, hint: Any) -> Any:
    """Convert a value to a type that is no union; raises ValueError, KeyError, OverflowError or
    TypeError if it does not fit."""
    is_word, origin, args = isinstance(value, Word), typing.get_origin(hint), typing.get_args(hint)
    if hint is types.NoneType and is_word and value == "None":
        return None
    if origin is Literal:
        return {str(choice) if is_word else choice: choice for choice in args}[value]
    if origin is dict and isinstance(value, dict):
        return {key: _as_type(item, args[1]) for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(_as_type(item, part) for item, part in zip(value, hints, strict=True))
    if is_word and hint in READERS:
        return READERS[hint][1](value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    raise ValueError(value)


def values_of(hint: Any, name: str = "") -> str:
    """Say which values a type has."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(values_of(part, name) for part in args if part is not types.NoneType)
    if origin is Literal:
        return f"one of {', '.join(map(as_toml, args))}"
    if origin is tuple:
        return "a list" if args[-1] is Ellipsis else f"a list of {len(args)} numbers"
    return f"a section, [{name}]" if origin is dict else READERS[hint][0]


def union_parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; of any other type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
