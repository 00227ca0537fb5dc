"""A table of the kinds of a model's parameters, with reasons, for reading before training."""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from lather.optim.kinds import KINDS, Decision

WIDTH = 80
"""Columns of the table."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches the parts of a name that are numbers: of layers, of experts."""


class Decisions(tuple[Decision, ...]):
    """The decisions about the parameters of a model, in their order. As text, it is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__


def table(decisions: Sequence[Decision]) -> str:
    """Return the table: each kind with its total, and in it each reason with its parameters.

    Parameters whose names differ only in numbers share a line, which has their count, the shape of
    each and the elements of all. A guess is marked with "?", a frozen parameter with "-".
    """
    lines = []
    for kind in KINDS:
        of_kind = [decision for decision in decisions if decision.kind == kind]
        if not of_kind:
            continue
        by_reason: dict[str, list[Decision]] = defaultdict(list)
        for decision in sorted(of_kind, key=attrgetter("is_guess")):
            by_reason["guess: " * decision.is_guess + decision.reason].append(decision)
        lines += [f"{kind}: {_total(of_kind)}"]
        for reason, of_reason in by_reason.items():
            lines += textwrap.wrap(reason, WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines += map(_line, alike(of_reason))
        lines += [""]
    lines += [f"in all: {_total(decisions)}"]
    if guesses := [decision for decision in decisions if decision.is_guess]:
        lines += [f"  ? a guess: {_total(guesses)}"]
    if frozen := [decision for decision in decisions if not decision.parameter.requires_grad]:
        lines += [f"  - frozen: {_total(frozen)}"]
    return "\n".join(lines)


def alike(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Gather decisions of one kind whose names differ only in numbers, and whose shapes agree."""
    gathered: dict[object, list[Decision]] = defaultdict(list)
    for decision in decisions:
        p = decision.parameter
        pattern = NUMBER.sub("*", decision.name)
        gathered[pattern, tuple(p.shape), p.requires_grad, decision.kind].append(decision)
    return list(gathered.values())


def name_of(decisions: Sequence[Decision]) -> str:
    """Return a name for decisions that are alike: `layers.{0-47}.weight` if the numbers differ."""
    columns = zip(*(NUMBER.findall(decision.name) for decision in decisions), strict=True)
    spans = iter([_span(sorted({int(number) for number in column})) for column in columns])
    return NUMBER.sub(lambda _: next(spans), decisions[0].name)


def _span(numbers: Sequence[int]) -> str:
    """Abbreviate numbers in ascending order: 3 as "3", 0, 1, 2 as "{0-2}", others by their ends."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return str(first)
    return f"{{{first}-{last}}}" if last - first < len(numbers) else f"{{{first},...,{last}}}"


def _line(decisions: Sequence[Decision]) -> str:
    """Return the line of decisions that are alike; several lines if the name is too long."""
    first, count = decisions[0], len(decisions)
    mark = "?" if first.is_guess else " " if first.parameter.requires_grad else "-"
    shape = tuple(first.parameter.shape)
    name = textwrap.fill(
        name_of(decisions),
        WIDTH,
        initial_indent=f"  {mark} ",
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )
    shapes = f"{count} x {shape}" if count > 1 else f"{shape}"
    numbers = f"{shapes}{_short(count * math.prod(shape)):>9}"
    room = WIDTH - len(numbers) - 1
    return f"{name:{room}} {numbers}" if len(name) <= room else f"{name}\n{numbers:>{WIDTH}}"


def _total(decisions: Sequence[Decision]) -> str:
    elements = sum(math.prod(decision.parameter.shape) for decision in decisions)
    noun = "parameter" if len(decisions) == 1 else "parameters"
    return f"{len(decisions):,} {noun}, {elements:,} elements"


def _short(count: int) -> str:
    """Write a count in at most seven characters: 9,999 as it is, 21,233,664 as 21.2M."""
    if count < 10_000:
        return f"{count:,}"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.1f}{' KMBT'[power]}"
