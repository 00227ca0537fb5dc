"""The options of a command: the fields of the dataclass as which its command line is parsed."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from lather.argument import Argument
from lather.config.fields import fields_of, union_parts
from lather.config.rule_fields import UNIONS, shown
from lather.optim.options import documentation_of

MANY = 10**9
"""Number of words of a list of any length."""


@dataclass(frozen=True)
class CommandOption:
    """An option of a command, or an argument that is given by its place."""

    name: str
    """Dotted, as in TOML."""
    hint: Any
    """Type."""
    default: str = ""
    """Where it is not given, in words; empty: nothing."""
    is_required: bool = False
    """Whether it has to be given."""
    argument: Argument = field(default_factory=Argument)
    section: type | None = None
    """The dataclass that has the field."""

    @property
    def flags(self) -> list[str]:
        """How it is written: --a.b-c, and --a.no-b-c of a switch; none for an argument that is
        given by its place."""
        section, dot, last = self.name.replace("_", "-").rpartition(".")
        if self.argument.positional:
            return []
        return [
            f"--{section}{dot}{no}{last}" for no in (("", "no-") if self.hint is bool else ("",))
        ]

    @property
    def text(self) -> str:
        """Description in `--help`."""
        description = self.argument.description
        if description or self.section is None:
            return description() if callable(description) else description
        return documentation_of(self.section).get(self.name.rpartition(".")[2], "")

    @property
    def metavar(self) -> str:
        """The word that stands for its value; empty for a switch."""
        if self.argument.positional:
            return self.argument.metavar or self.name.upper()
        return "" if self.hint is bool else self.argument.metavar or _metavar(self.hint)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have; none: any of its type."""
        return tuple(str(value) for value in _literals(self.hint) if value is not None)

    @property
    def words(self) -> tuple[Any, int]:
        """The type of the words that follow it, and the number of words in its list; 0: it takes a
        single word, and no list."""
        parts = [part for part in union_parts(self.hint) if part is not types.NoneType]
        args = typing.get_args(parts[0])
        if len(parts) > 1 or typing.get_origin(parts[0]) not in (tuple, dict):
            return self.hint, 0
        if self.argument.repeated:
            return args[0], 0
        return args[0], MANY if args[-1] is Ellipsis else len(args)


def options_of_command(
    cls: type, values: Mapping[str, Any] | None = None, prefix: str = ""
) -> Iterator[CommandOption]:
    """Yield the options of a dataclass of arguments, and its arguments that are given by their
    place, with those of its sections. `values`: the values where an option is not given; they
    decide the classes of sections."""
    values = values or {}
    for name, declared in fields_of(cls).items():
        argument = declared.argument
        if declared.sections:
            inner = values if argument.inline else values.get(name)
            inner = inner if isinstance(inner, Mapping) else {}
            key = prefix if argument.inline else f"{prefix}{name}."
            section = declared.section(inner, key.removesuffix("."))
            yield from options_of_command(section, inner, key)
        else:
            value = values.get(name, declared.default)
            default = argument.default if value in (None, False, {}, MISSING) else shown(value)
            is_required = declared.default is MISSING
            yield CommandOption(prefix + name, declared.hint, default, is_required, argument, cls)


def _metavar(hint: Any) -> str:
    """Return the placeholder of `--help` for a value of this type; None is not shown as a value."""
    origin, parts = (
        typing.get_origin(hint),
        [part for part in typing.get_args(hint) if part not in (types.NoneType, Ellipsis)],
    )
    if hint is bool:
        return "{True,False}"
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin in (tuple, dict, *UNIONS):
        return ("|" if origin in UNIONS else " ").join(map(_metavar, parts))
    return str(hint.__name__.upper())


def _literals(hint: Any) -> Iterator[object]:
    """The values of `Literal` in a type, also within a union or a tuple."""
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is Literal:
            yield part
        else:
            yield from _literals(part)
