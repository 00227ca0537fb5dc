"""Fields of `[optim]` that are derived from the options of rules, so that TOML, command line and
`--help` need no list of their own.

A field has the type of its option, reduced to types that a command line can parse: numbers,
strings, choices, and tuples of these. Options of other types, and options that the trainer sets
itself, have no field.
"""

from __future__ import annotations

import ast
import functools
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, cast

from lather.errors import ConfigError, as_toml, require
from lather.optim import Rule
from lather.optim.batched.known_keys import EQUIVALENTS
from lather.optim.controls import CONTROLS
from lather.optim.options import BY_PART, Option, documentation_of, holds, name_of, options_of
from lather.optim.plain import saveable
from lather.optim.rules import RULES, find_rule

DECIDED = {
    "matrix_layout": "each expert is a matrix of its own, or all are one stack for stacked_soap",
    **dict.fromkeys(("head_rows", "head_columns"), "heads are those of the model, with per_head"),
    "nonfinite": "a step whose loss or gradient is not finite is skipped",
    "maximize": "the loss is minimized",
}
"""Options that the trainer sets itself, and how."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "soap": {"lr": 4e-3, "second_moment": "rotate"},
    "adamw": {"lr": 2e-3},
    "muon": {"momentum": 0.9},
    "soap_muon": {"momentum": 0.9},
    "adamuon": {"momentum": 0.9},
}
"""Defaults of the trainer that differ from the rule's own. In addition, `sides` is "auto" where the
rule has "both", and `weight_rounding` is "remainder"."""

STARTS = ("slow_momentum_start",)
"""Options that are a number of steps, and in a configuration also a fraction of the run."""

START_WORDS = "an integer >= 0, or a fraction of the run in (0, 1)"
"""The values of these options, in words."""

DEFAULT_LR = 6e-3
"""Learning rate of rules without a default."""

MEASURED_TOKENS = 1024, 8192
"""Tokens per step at which the best learning rates were measured (docs/results.md): the default
rate grows between the two and is constant outside."""
LR_EXPONENT = 0.25
"""The default rate grows with this power of the tokens per step; measured were 0.23 for Muon and
0.33 for AdamW."""

PLAIN = (bool, int, float, str)
"""Types that a command line can parse, in the order in which they are tried: str, which takes every
value, is the last."""
UNIONS = (types.UnionType, typing.Union)


F = TypeVar("F", bound=Callable[..., Any])


def cached_by_class(function: F) -> F:
    """Cache the results of a function of a class, which mypy does not know to be hashable."""
    return cast(F, functools.cache(function))


def check_ranges(values: Any, prefix: str, cls: type | None = None) -> None:
    """Raise ConfigError for the first field of a dataclass whose value is out of the range that
    stands at it. The error writes the name after `prefix`, with dashes if that is `--`. `cls`: the
    class whose fields are checked; None: that of `values`."""
    for name, option in options_of(cls or type(values)).items():
        written = name.replace("_", "-") if prefix == "--" else name
        if option.range is not None:
            value = getattr(values, name)
            require(holds(option.range.holds, value), prefix + written, value, option.range.words)


def search_current_folder() -> None:
    """Let Python find modules of the current folder, too, last of all."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def rule_named(name: str, field: str) -> type[Rule]:
    """Return the rule with this name, or `module:Class` (the current folder is searched too).
    Raises ConfigError, naming `field`, if there is none."""
    if ":" in name:
        search_current_folder()
    try:
        return find_rule(name)
    except ValueError as error:
        known, reason = ", ".join(map(repr, RULES)), f" ({error})" if ":" in name else ""
        raise ConfigError(
            f"{field} = {name!r} is not valid: it must be one of {known}, or module:Class of your "
            f"own rule{reason}"
        ) from None


@cached_by_class
def option_fields(rule: type) -> dict[str, tuple[Any, Any]]:
    """Return (type, default) of each option of a rule that is a field, by name: first the learning
    rate, then positional options, the rule's other options, and the options that all rules have. A
    default of None means that there is none, or that None is the default."""
    common, positional = options_of(Rule), {each.name for each in fields(rule) if not each.kw_only}

    def rank(name: str) -> tuple[bool, bool, bool]:
        return name != "lr", name not in positional, name in common

    options = options_of(rule)
    hints = {name: plain_type(options[name].hint) for name in options if name not in DECIDED}
    hints |= {name: int | float for name in STARTS if name in hints}
    return {
        name: (hints[name], _default(rule, options[name], hints[name]))
        for name in sorted(hints, key=rank)
        if hints[name] is not None
    }


def default_lr(rule: type, tokens_per_step: int = MEASURED_TOKENS[0]) -> float:
    """Return the default peak learning rate of matrices. That of a user's rule does not depend on
    the tokens per step."""
    lr = float(option_fields(rule)["lr"][1])
    if rule not in RULES.values():
        return lr
    least, most = MEASURED_TOKENS
    return float(f"{lr * (min(max(tokens_per_step, least), most) / least) ** LR_EXPONENT:.3g}")


def inherited_by(rule: type[Rule], other: type[Rule], *, as_matrices: bool = True) -> set[str]:
    """Return the options that a kind with `rule` inherits from a section with the rule `other`.
    `as_matrices`: whether the kind is of matrices, as the section's; others inherit no controls."""
    shared = {"weight_decay", *options_of(Rule)} if rule is not other else {*option_fields(rule)}
    shared -= {"lr"} if as_matrices else {"lr", *CONTROLS}
    return shared & option_fields(rule).keys() & option_fields(other).keys()


def plain_type(hint: Any) -> Any:
    """Reduce a type to the part that a command line and TOML can express; None if nothing is
    left."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    order = {part: place for place, part in enumerate(PLAIN)}
    plain = sorted(filter(_is_plain, parts), key=lambda part: order.get(part, 0))
    if not set(plain) - {types.NoneType}:
        return None
    return functools.reduce(operator.or_, plain)


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        return all(part is Ellipsis or part in PLAIN for part in typing.get_args(hint))
    return hint in (*PLAIN, types.NoneType) or typing.get_origin(hint) is Literal


def _default(rule: type, option: Option, hint: Any) -> Any:
    default = DEFAULTS.get(getattr(rule, "name", ""), {}).get(option.name, option.default)
    if default is MISSING:
        return DEFAULT_LR if option.name == "lr" else None
    if option.name == "sides" and default == "both":
        return "auto"
    if option.name == "weight_rounding":
        return "remainder"  # which concerns bf16 weights alone (`train.weight_dtype`)
    if option.name == "state_dtype" and default is None:
        # fp64 models are for comparisons of runs. Rounded to fp32, gradients that differ in their
        # last bits are equal; the eigenvectors of the null space of a factor depend on these bits.
        return "float32"
    return as_text(float(default) if hint is float else default)


def as_text(value: Any) -> Any:
    """Write a dtype, or dtypes by part, as a command line does; return any other value
    unchanged."""
    value = saveable(value)
    if isinstance(value, Mapping):
        return ",".join(f"{part}={dtype}" for part, dtype in value.items())
    return value


def in_toml(message: str, prefix: str) -> str:
    """Rewrite the message of a rule about its options, which speaks Python, for a configuration:
    the fields, whose names begin with `prefix`, and their values are written as in TOML."""

    def assigned(match: re.Match[str]) -> str:
        name, text = match.groups()
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):  # a dtype, or dtypes by part
            value = re.sub(r"'(\w+)': ", r"\1=", text.strip("{}")).replace("torch.", "")
        return f"{name} = {as_toml(value)}"

    message = re.sub(r"\b([a-z_]\w*)=([({\[][^(){}]*[)}\]]|'[^']*'|[\w.+-]+)", assigned, message)
    message = re.sub(r"torch\.(?=float|bfloat|int)", "", message.partition(" or a callable")[0])
    by_part = "'moments=int8,factors=int16' (moments, bases, factors; int16 for factors alone)"
    message = message.replace(BY_PART, by_part)
    message = message.replace("True or False", "true or false")
    return prefix + re.sub(",? or None", "", message)


def shown(value: Any) -> str:
    """Write a value as a command line does."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def described(rule: type[Rule], name: str) -> str:
    """Return the text of an option for `--help`: its documentation, with the range of its values if
    that says more than the type."""
    text, values = documentation_of(rule).get(name, ""), options_of(rule)[name].range
    words = "" if values is None else values.words.partition(" or a callable")[0]
    words = START_WORDS if name in STARTS else words
    if words and "one of" not in words and "torch" not in words and not words.startswith("True"):
        text = f"{text} {words[0].upper()}{words[1:]}."
    return text


def owners(option: str, rule: type[Rule]) -> str:
    """Say who has an option that `rule` lacks: the trainer, or other rules; empty: nobody, or
    `rule` has it."""
    if option in DECIDED:
        return f"{option} is set by the trainer: {DECIDED[option]}"
    names = [name for name, other in RULES.items() if option in option_fields(other)]
    if not names or option in option_fields(rule):
        return ""
    listed = " and ".join(", ".join(names).rsplit(", ", 1))
    text = f"{option} is an option of {listed}, not of {name_of(rule)}"
    same = [name for name, _ in EQUIVALENTS.get(option, ()) if name in option_fields(rule)]
    return f"{text}: did you mean {same[0]}?" if same else text
