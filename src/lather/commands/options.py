"""The options of a command, found from the dataclass as which its command line is parsed."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

import tyro

from lather.config.rule_fields import metavar
from lather.optim.options import documentation_of

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
        return [
            f"--{section}{dot}{no}{last}" for no in (("", "no-") if self.hint is bool else ("",))
        ]

    @property
    def metavar(self) -> str:
        """The word that stands for its value; empty for a switch."""
        return "" if self.hint is bool else metavar(self.hint)

    @property
    def choices(self) -> list[str]:
        """The values that it can have; none: any of its type."""
        return [str(value) for value in _literals(self.hint) if value is not None]


def options_of_command(
    cls: type, default: object = None, prefix: str = ""
) -> Iterator[CommandOption]:
    """The options of a dataclass of arguments, without positional ones, and with those of sections
    that are left out; `default`: an instance, whose sections may be of classes of their own."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), documentation_of(cls)
    for one in fields(cls):
        marks = getattr(
            hints[one.name], "__metadata__", ()
        )  # what `Annotated` and tyro say of a type
        hint = hints[one.name].__origin__ if marks else hints[one.name]
        value = (
            getattr(default, one.name)
            if default is not None
            else None
            if one.default is MISSING
            else one.default
        )
        left_out = (
            [part for part in typing.get_args(hint) if is_dataclass(part)] if value is None else []
        )
        section = type(value) if is_dataclass(value) else left_out[0] if left_out else hint
        says = {
            key: said
            for key in SAID
            for mark in marks
            if (said := getattr(mark, key, None)) is not None
        }
        if is_dataclass(section):
            inner = prefix if says.get("name") == "" else f"{prefix}{one.name}."
            yield from options_of_command(typing.cast(type, section), value, inner)
        elif not {tyro.conf.Positional, tyro.conf.Suppress} & {*marks}:
            values = (
                value
                if isinstance(value, tuple)
                else ()
                if value is None or value is False
                else (value,)
            )
            shown = says.get("help_behavior_hint", "").removeprefix("(default: ").removesuffix(
                ")"
            ) or " ".join(map(str, values))
            yield CommandOption(
                prefix + one.name, hint, shown, says.get("help") or texts.get(one.name, "")
            )


def _literals(hint: Any) -> Iterator[object]:
    """The values of `Literal` in a type, also within a union or a tuple."""
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is Literal:
            yield part
        else:
            yield from _literals(part)
