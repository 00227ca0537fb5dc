"""A configuration from and to TOML; every error names the file and the key.

`[model]` is one family's configuration: its key `model_type` says which, "deepseek_v2" if it is left out.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from lather.errors import ConfigError, require
from lather.train.config import Config

C = TypeVar("C")


def load_config(path: Path) -> Config:
    """Read a TOML file; every error names the file and the key."""
    try:
        mapping = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; configs/ holds examples") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    try:
        return config_from_mapping(mapping)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Nested mappings to a `Config`; missing keys keep their defaults."""
    return _build(Config, mapping, "")


def config_to_toml(config: Config) -> str:
    """The resolved configuration; `load_config` gives the same one back."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def field_names(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, sections left out."""
    for name, hint in typing.get_type_hints(cls).items():
        if sections := _sections(hint):
            yield from dict.fromkeys(key for section in sections for key in field_names(section, f"{prefix}{name}."))
        else:
            yield f"{prefix}{name}"


def _sections(hint: Any) -> list[type]:
    """The dataclasses that a field of this type may hold; none: it is a plain value."""
    return [one for one in typing.get_args(hint) or (hint,) if isinstance(one, type) and dataclasses.is_dataclass(one)]


def _chosen(sections: list[type], mapping: Mapping[str, Any], name: str) -> type:
    """The one that the section's `model_type` names, where there are several."""
    by_type = {getattr(section, "model_type", ""): section for section in sections}
    model_type = mapping.get("model_type", next(iter(by_type)))
    if len(sections) > 1:
        known = ", ".join(map(repr, by_type))
        require(model_type in list(by_type), f"{name}.model_type", model_type, f"one of {known}")
        return by_type[model_type]
    return sections[0]


def _without_none(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in mapping.items() if value is not None}


def _build(cls: type[C], mapping: Mapping[str, Any], prefix: str) -> C:
    hints = typing.get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            raise ConfigError(f"unknown key {prefix + key!r}; {_owner(cls, key) or _nearest(prefix + key)}")
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        hint, name = hints[key], prefix + key
        if sections := _sections(hint):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} = {value!r} is not valid: it must be a section, [{name}]")
            values[key] = _build(_chosen(sections, value, name), value, f"{name}.")
        else:
            values[key] = _convert(value, hint, name)
    return cls(**values)


def _owner(cls: type, key: str) -> str:
    """Which other families have the key."""
    families = _sections(typing.get_type_hints(Config)["model"])
    others = [repr(getattr(family, "model_type", "")) for family in families if key in typing.get_type_hints(family)]
    if cls not in families or not others:
        return ""
    return f"it is a key of model_type {' and '.join(others)}, not of {getattr(cls, 'model_type', '')!r}"


def _nearest(name: str) -> str:
    """What the user may have meant: the section or field most like the last component of `name`, or the keys of its section."""
    sections = [f.name for f in dataclasses.fields(Config)]
    known = [*sections, *(key for key in field_names() if "." in key)]
    section, _, last = name.rpartition(".")

    def likeness(other: str) -> float:
        """A field of the same section wins a tie."""
        other_section, _, other_last = other.rpartition(".")
        return difflib.SequenceMatcher(None, last, other_last).ratio() + 0.1 * (section == other_section)

    if likeness(best := max(known, key=likeness)) >= 0.7:
        return f"did you mean {best!r}?"
    siblings = [other for other in known if other.startswith(f"{section}.")] or sections
    return f"known keys: {', '.join(siblings)}"


def _convert(value: Any, hint: Any, name: str) -> Any:
    """A TOML value as the field's type; an int is taken for a float, nothing else is converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert(value, next(arg for arg in args if arg is not type(None)), name)
    if origin is Literal:
        require(value in args, name, value, "one of " + ", ".join(repr(arg) for arg in args))
        return value
    if origin is tuple and args[-1] is Ellipsis:
        require(isinstance(value, list), name, value, "a list")
        return tuple(_convert(item, args[0], name) for item in value)
    if origin is tuple:
        require(isinstance(value, list) and len(value) == len(args), name, value, f"a list of {len(args)} numbers")
        return tuple(_convert(item, arg, name) for item, arg in zip(value, args, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) <= sys.float_info.max, name, value, "a number that a float can hold")
        return float(value)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    require(type(value) is hint, name, value, words[hint])
    return value
