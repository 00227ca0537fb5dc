"""The options of rules as fields of `[optim]`: TOML, command line and `--help` have them from the rules, where they are typed once.

A field has the type of its option, reduced to what a command line can give: numbers, text, choices and tuples of these. Options of other
types, and those that the trainer decides itself, are no fields.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal

import tyro

from lather.errors import ConfigError
from lather.optim import Rule
from lather.optim.options import Option, documentation_of, options_of, saveable
from lather.optim.rules import RULES, find_rule

DECIDED = {
    "matrix_layout": "experts are matrices of their own, or a stack for stacked_soap",
    "nonfinite": "a step that is not finite is skipped as a whole",
    "maximize": "a loss is minimized",
}
"""Options that the trainer decides, and how."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "soap": {"lr": 4e-3, "second_moment": "rotate"},
    "adamw": {"lr": 2e-3},
    "muon": {"momentum": 0.9},
    "soap_muon": {"momentum": 0.9},
}
"""Defaults of the trainer, where they are not the rule's own; besides these, `sides` is "auto" where it is "both"."""

DEFAULT_LR = 6e-3
"""Learning rate of rules that have none of their own."""

MEASURED_TOKENS = 1024, 8192
"""Tokens a step between which the best rates were measured (docs/results.md): beyond them the default rate stays what it is there."""
LR_EXPONENT = 0.25
"""Power of the tokens of a step with which the default rate grows: the best one grew with 0.23 for Muon, 0.33 for AdamW."""

PLAIN = (bool, int, float, str)
"""Types of values, in the order in which a value is tried."""


def rule_named(name: str, field: str) -> type[Rule]:
    """The rule of this name, or `module:Class` (the current folder counts); ConfigError, which names `field`, if there is none."""
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return find_rule(name)
    except ValueError as error:
        known, reason = ", ".join(map(repr, RULES)), f" ({error})" if ":" in name else ""
        raise ConfigError(f"{field} = {name!r} is not valid: it must be one of {known}, or module:Class of your own rule{reason}") from None


def fields_of(rule: type) -> dict[str, tuple[Any, Any]]:
    """(type, default) of the options of a rule that are fields, by name: the learning rate, others that may be positional, the rule's own,
    those of all rules. A default is None where the option has none, or it is that."""
    return _fields_of(rule)


@functools.cache
def _fields_of(rule: type) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    common, positional = options_of(Rule), {one.name for one in fields(rule) if not one.kw_only}
    for name, option in sorted(options_of(rule).items(), key=lambda item: (item[0] != "lr", item[0] not in positional, item[0] in common)):
        hint = None if name in DECIDED else plain_type(option.hint)
        if hint is not None:
            found[name] = (hint, _default(rule, option, hint))
    return found


def default_lr(rule: type, tokens_per_step: int = MEASURED_TOKENS[0]) -> float:
    """The peak learning rate of matrices under a rule, where none is given; that of a rule of the user's own does not grow."""
    own = float(fields_of(rule)["lr"][1])
    if rule not in RULES.values():
        return own
    least, most = MEASURED_TOKENS
    return float(f"{own * (min(max(tokens_per_step, least), most) / least) ** LR_EXPONENT:.3g}")


def own_fields(rule: type[Rule]) -> list[str]:
    """The fields that not every rule has."""
    common = options_of(Rule).keys()
    return [name for name in fields_of(rule) if name not in common]


def inherited_by(rule: type[Rule], other: type[Rule]) -> set[str]:
    """Options that a group of `rule` takes over from an `[optim]` of the rule `other`, where it has none of its own."""
    if rule is other:
        return set(fields_of(rule)) - {"lr"}
    return ({"weight_decay", *options_of(Rule)} & fields_of(rule).keys() & fields_of(other).keys()) - {"lr"}


def plain_type(hint: Any) -> Any:
    """A type reduced to what a command line and TOML can give; None if nothing is left."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = [part for part in (typing.get_args(hint) if union else (hint,)) if _is_plain(part)]
    parts.sort(key=lambda part: PLAIN.index(part) if part in PLAIN else 0)  # text last: everything could be text
    if not set(parts) - {types.NoneType}:
        return None
    return functools.reduce(lambda one, other: one | other, parts)


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        return all(part is Ellipsis or part in PLAIN for part in typing.get_args(hint))
    return hint in (*PLAIN, types.NoneType) or typing.get_origin(hint) is Literal


def _default(rule: type, option: Option, hint: Any) -> Any:
    trainers = DEFAULTS.get(getattr(rule, "name", ""), {})
    if option.name in trainers:
        return trainers[option.name]
    if option.default is MISSING:
        return DEFAULT_LR if option.name == "lr" else None
    if option.name == "sides" and option.default == "both":
        return "auto"
    return as_text(float(option.default) if hint is float else option.default)


def as_text(value: Any) -> Any:
    """A dtype, or dtypes by part, as a command line gives them; anything else as it is."""
    value = saveable(value)
    return ",".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, Mapping) else value


def shown(value: Any) -> str:
    """The text of a value, as a command line gives it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def described(rule: type[Rule], name: str, hint: Any, hint_of_default: str | None = None) -> Any:
    """The type with what `--help` says of the option; `hint_of_default`: of its default, if it is not the field's."""
    text, values = documentation_of(rule).get(name, ""), options_of(rule)[name].range
    words = "" if values is None else values.words.partition(" or a callable")[0]
    if words and "one of" not in words and "torch" not in words and not words.startswith("True"):
        text = f"{text} {words[0].upper()}{words[1:]}."
    options: dict[str, Any] = {"help": text}
    if hint_of_default is not None:
        options |= {"help_behavior_hint": hint_of_default, "metavar": metavar(hint)}
    return Annotated[hint, tyro.conf.arg(**options)]


def metavar(hint: Any) -> str:
    """How `--help` writes a value of this type, where leaving it out is no value."""
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType] if _is_union(hint) else [hint]
    return "|".join(_metavar(part) for part in parts)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _metavar(hint: Any) -> str:
    if hint is bool:
        return "{True,False}"
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    if typing.get_origin(hint) is tuple:
        return " ".join(_metavar(part) for part in typing.get_args(hint) if part is not Ellipsis)
    return str(hint.__name__.upper())


def owners(option: str, rule: type[Rule]) -> str:
    """The owner of an option that `rule` does not have, or that it has for others than the trainer; nothing if nobody has it."""
    this = name_of(rule)
    if option in DECIDED:
        return f"{option} is the trainer's to decide: {DECIDED[option]}"
    having = [name for name, other in RULES.items() if option in fields_of(other)]
    if not having:
        return ""
    named = ", ".join(having[:-1]) + " and " * (len(having) > 1) + having[-1]
    return f"{option} is an option of {named}, not of {this}"


def name_of(rule: type[Rule]) -> str:
    """The name under which `[optim]` has the rule."""
    return rule.__dict__.get("name") or f"{rule.__module__}:{rule.__qualname__}"
