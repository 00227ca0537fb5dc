"""Arguments that are no options of a rule: options under the names of a published interface, and
messages for arguments that an optimizer does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lather.optim.batched.known_keys import (
    EQUIVALENTS,
    HARMLESS,
    LEAVE_OUT,
    OTHER_NAMES,
    WHAT_HAPPENS,
)
from lather.optim.options import options_of
from lather.optim.plain import plain
from lather.optim.rule import Rule

LIKENESS = 0.7
"""Least similarity to an option at which an unknown argument is taken for a misspelt one."""


Published = Mapping[str, tuple[bool, str, str, str]]
"""Name in a published interface -> the value that asks for something; the option that asks for the
same, its default, and its value."""


def translated(
    given: Mapping[str, Any], published: Published, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments, or the keys of a group, with options in place of published names.

    `inherited`: values of options that are not given. Raises ValueError for a value that is neither
    True nor False, and for one that contradicts the option.
    """
    options = dict(given)
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


def describe_unknown(
    optimizer: str,
    unknown: Sequence[str],
    known: Sequence[str],
    others: Mapping[str, type[Rule]],
) -> str:
    """Say which arguments an optimizer does not have, what is meant by each, and which it has.

    Args:
        optimizer: name of the class.
        unknown: names of the arguments that it does not have.
        known: names of those that it has.
        others: rules by the names of their optimizers, whose options may be meant.
    """
    each = ", ".join(
        f"{name!r} ({hint})" if (hint := _hint(name, known, others)) else f"{name!r}"
        for name in unknown
    )
    noun = "argument" if len(unknown) == 1 else "arguments"
    return f"{optimizer} has no {noun} {each}. Its arguments are {', '.join(known)}"


def equivalent(name: str, known: Collection[str]) -> str:
    """Say which of the options `known` has the meaning of an option that is not among them; empty
    if none has."""
    for option, text in EQUIVALENTS.get(name.lower(), ()):
        if option in known:
            return text
    return ""


def _hint(name: str, known: Sequence[str], others: Mapping[str, type[Rule]]) -> str:
    lower = name.lower()
    if text := equivalent(lower, known):
        return text
    if (meant := OTHER_NAMES.get(lower, lower)) in known:
        return f"did you mean {meant!r}?"
    if owners := [other for other, rule in others.items() if meant in options_of(rule)]:
        return f"it is an argument of {', '.join(owners)}"
    if near := difflib.get_close_matches(lower, known, 1, LIKENESS):
        return f"did you mean {near[0]!r}?"
    if lower in HARMLESS:
        return "it changes no number: leave it out"
    return LEAVE_OUT.replace("the key", "it") if lower in WHAT_HAPPENS else ""
