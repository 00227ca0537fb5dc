"""Messages for arguments that an optimizer does not have: what may be meant by each."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from lather.optim.engine.known_keys import (
    EQUIVALENTS,
    HARMLESS,
    LEAVE_OUT,
    OTHER_NAMES,
    WHAT_HAPPENS,
)
from lather.optim.options import options_of
from lather.optim.rule import Rule

LIKENESS = 0.7
"""Least similarity to an option at which an unknown argument is taken for a misspelt one."""


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
