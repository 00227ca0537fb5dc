"""Arguments of optimizers: the documentation of their options, options under the names of a
published interface, and messages for arguments that an optimizer does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from lather.optim.batched.known_keys import (
    EQUIVALENTS,
    HARMLESS,
    LEAVE_OUT,
    OTHER_NAMES,
    WHAT_HAPPENS,
)
from lather.optim.options import documentation_of, options_of
from lather.optim.plain import plain, saveable
from lather.optim.rules import RULES

LIKENESS = 0.7
"""Least similarity to an option at which an unknown argument is taken for a misspelt option."""


class DocumentedByRule(type):
    """Metaclass that appends the options of the rule to the docstring of an optimizer, when
    somebody reads it."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        text, rule = vars(cls).get("__doc__") or cls.__name__, vars(cls).get("rule")
        if rule is None:
            return text
        texts, lines = documentation_of(rule), list[str]()
        for name, option in options_of(rule).items():
            has_none = option.default is MISSING
            default = "" if has_none else f" Default: {saveable(option.default)!r}."
            lines.append(f"    {name}: {texts.get(name, '')}{default}")
        params = "    params: Parameters, as for `MatrixOptimizer`."
        return "\n".join([text, "", "Args:", params, *lines])


Published = Mapping[str, tuple[bool, str, str, str]]
"""Name in a published interface -> the value that asks for something; the option that asks for the
same, its default, and its value."""


def translated(
    arguments: Mapping[str, Any], published: Published, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments, or the keys of a group, with options in place of published names.

    `inherited`: values of options that are left out. Raises ValueError for a value that is neither
    True nor False, and for a value that contradicts the option.
    """
    options = dict(arguments)
    for name, (asking, option, default, value) in published.items():
        if name not in options:
            continue
        asked = plain(options.pop(name))
        if not isinstance(asked, bool):
            raise ValueError(f"{name}={asked!r} is not valid: give True or False")
        if asked == asking:
            if options.setdefault(option, value) not in (default, value):
                raise ValueError(
                    f"{name}={asked} contradicts {option}={options[option]!r}: give {option} alone"
                )
            options[option] = value
        elif inherited.get(option) == value:
            options.setdefault(option, default)
    return options


def describe_unknown(optimizer: str, unknown: Sequence[str], known: Sequence[str]) -> str:
    """Say which arguments an optimizer does not have, what is meant by each, and which it has.

    Args:
        optimizer: name of the class.
        unknown: names of the arguments that it does not have.
        known: names of those that it has.
    """
    hints = [(name, _hint(name, known)) for name in unknown]
    each = ", ".join(f"{name!r} ({hint})" if hint else f"{name!r}" for name, hint in hints)
    noun = "argument" if len(unknown) == 1 else "arguments"
    return f"{optimizer} has no {noun} {each}. Its arguments are {', '.join(known)}"


def equivalent(name: str, known: Collection[str]) -> str:
    """Say which of the options `known` has the meaning of an option that is not among them; empty
    if none has."""
    pairs = EQUIVALENTS.get(name.lower(), ())
    return next((text for option, text in pairs if option in known), "")


def _hint(name: str, known: Sequence[str]) -> str:
    lower = name.lower()
    if text := equivalent(lower, known):
        return text
    if (meant := OTHER_NAMES.get(lower, lower)) in known:
        return f"did you mean {meant!r}?"
    rules = [rule.__name__ for rule in RULES.values() if meant in options_of(rule)]
    if rules:
        optimizers = ", ".join(name.removesuffix("Rule") for name in rules)
        return f"it is an argument of {optimizers}"
    if near := difflib.get_close_matches(lower, known, 1, LIKENESS):
        return f"did you mean {near[0]!r}?"
    if lower in HARMLESS:
        return "it changes no number: leave it out"
    return LEAVE_OUT.replace("the key", "it") if lower in WHAT_HAPPENS else ""
