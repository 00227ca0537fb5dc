"""Errors that the user can correct: one line with the file or field, the value and the remedy. The
command exits with status 2."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping


class UserError(ValueError):
    """Base class of all errors that the user can correct."""


class ConfigError(UserError):
    """A configuration value, key or combination is not valid."""


class DataError(UserError):
    """Text, a tokenizer or token shards are missing, damaged or unsuitable."""


class RunError(UserError):
    """The folder of a run, a sweep or a study cannot be used: it is not writable, in use, or
    belongs to another configuration."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""


class ExchangeError(UserError):
    """A Hugging Face folder cannot be read or written: a file, field or tensor is missing, damaged
    or does not fit."""


def require(holds: bool, field: str, value: object, constraint: str) -> None:
    """Raise ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{field} = {as_toml(value)} is not valid: it must be {constraint}")


def as_toml(value: object) -> str:
    """Write a value for messages as TOML does: `true` and `[1, 2]`, not `True` and `(1, 2)`; a
    dataclass as the fields that are set, and None as `none`."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, str):
        is_literal = "'" not in value and value.isprintable()
        return f"'{value}'" if is_literal else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return repr(float(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return as_toml({name: inner for name, inner in fields.items() if inner is not None})
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return str(value)
