"""The mark by which a field of a dataclass says how a command line takes and describes it, in
`typing.Annotated`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """How a command line takes a field, where that does not follow from its name and type."""

    positional: bool = False
    """It is given by its place, without a name."""
    metavar: str = ""
    """The word that stands for its value in help; empty: a word made from its type."""
    repeated: bool = False
    """Each value of the list has the option before it."""
    inline: bool = False
    """The fields of this section are options without the section's name before them."""
    hidden: bool = False
    """It is taken, and help does not show it."""
    description: str | Callable[[], str] = ""
    """Description, or a function that returns it; empty: the string under the field."""
    default: str = ""
    """The value where none is given, in words; empty: that of the field."""
