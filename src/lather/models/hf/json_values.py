"""Values of a `config.json`: conversion to the types of fields, and how messages show them."""

from __future__ import annotations

import json
import types
import typing
from typing import Any

from lather.errors import ConfigError, as_toml

MAX_INTEGER = 10**8
MAX_CHARACTERS = 80
"""Characters of a value that a message shows."""
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def shown(value: Any) -> str:
    """Write a value with the words of JSON, a string in single quotes; the end of a long text is
    cut."""
    text = as_toml(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def typed(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to the type of a field: only an int to a float and a list to a tuple; all
    other types must match. Raises ConfigError, with the field's name."""
    if typing.get_origin(hint) is types.UnionType:
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} = {shown(value)} is not valid: it must be a list")
        return tuple(typed(item, typing.get_args(hint)[0], name) for item in value)
    limit = MAX_INTEGER if hint is int else 10**300
    if type(value) is int and abs(value) >= limit:
        raise ConfigError(
            f"{name} = {str(value)[:20]}... is not valid: it must be below {limit:.0e}"
        )
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name} = {shown(value)} is not valid: it must be {WORDS[hint]}")
    return value
