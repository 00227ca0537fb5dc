"""The names that a user may have meant by one that there is not: what other trainers call the same,
and the most similar ones."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lather.config.optim import OptimConfig
from lather.config.others_names import NO_FIELD, NOTES, OTHERS_NAMES

T = TypeVar("T")

LIKE = 0.7
"""How similar a name of the same section has to be to be taken for a slip, from 0 to 1."""
LIKE_ELSEWHERE = 0.85
"""The same for a name of another section."""
OPTIM_FIELDS = {one.name for one in dataclasses.fields(OptimConfig)}


def hint_of(name: str, known: Iterable[str], write: Callable[[str], str] = repr) -> str:
    """Return a sentence on a name that there is not: which of the dotted names `known` may be
    meant, as `write` writes them, or why there is none. Empty if nothing is like it."""
    lower = name.lower()
    if reason := _of(lower, NO_FIELD):
        return reason
    names = nearest_names(lower, known)
    if not names:
        return ""
    note = next((_of(lower, notes) for field, notes in NOTES.items() if _is(names[0], field)), "")
    return f"did you mean {' or '.join(map(write, names))}?{f' ({note})' if note else ''}"


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return those of the dotted names `known` for which `name` may stand, none if nothing is like
    it: first what other trainers call so, then names of the same section that are similar, then the
    same name in other sections, and at last very similar names there."""
    section, _, last = name.lower().rpartition(".")
    known = list(dict.fromkeys(known))
    sections = {one.rpartition(".")[0] for one in known}
    if section not in sections:
        section = _most_similar(section, {one: one for one in sections}, LIKE) or section
    siblings = [one for one in known if one.rpartition(".")[0] == section]
    others = [one for one in known if one not in siblings]
    fields = [field for field, names in OTHERS_NAMES.items() if last in names.split()]
    meant = [one for one in known if one in fields]
    meant = meant or [one for one in known if any(_is(one, field) for field in fields)]
    same = [one for one in known if one.rpartition(".")[2] == last]
    similar = _most_similar(last, {one.rpartition(".")[2]: [one] for one in siblings}, LIKE)
    if fields:
        return _nearest(section, meant)
    return similar or _nearest(section, same) or _elsewhere(section, last, others)


def _is(name: str, field: str) -> bool:
    """Whether a name is a field; one without a section may also be an option of a rule, or the last
    part of a name where there are no sections."""
    section, _, last = name.rpartition(".")
    of_rule = "." not in field and section.startswith("optim") and last == field
    return name == field or of_rule or (not section and field.rpartition(".")[2] == last)


def _nearest(section: str, names: list[str]) -> list[str]:
    """Return the names whose section is most like `section`; of several, those of the fewest
    sections, and of these the fields of the trainer before the options of rules."""

    def place(name: str) -> tuple[float, int, bool, bool]:
        own = name.rpartition(".")[0]
        fit = _ratio(section, own) if section else 0.0
        is_rest = own == "optim.rest"  # of which the router inherits
        return fit if fit >= LIKE else 0.0, -name.count("."), not _is_of_rule(name), is_rest

    return [name for name in names if place(name) == max(map(place, names))]


def _elsewhere(section: str, last: str, names: list[str]) -> list[str]:
    """Return the name of another section that is most similar."""
    by_last: dict[str, list[str]] = {}
    for one in names:
        by_last.setdefault(one.rpartition(".")[2], []).append(one)
    return _nearest(section, _most_similar(last, by_last, LIKE_ELSEWHERE) or [])


def _most_similar(name: str, names: Mapping[str, T], least: float) -> T | None:
    """Return what is under the name that is most like `name`, if one is similar enough."""
    best = max(names, key=lambda one: _ratio(name, one), default="")
    return names[best] if names and _ratio(name, best) >= least else None


def _of(name: str, texts: Mapping[str, str]) -> str:
    """Return the text of a name, or of its last part."""
    by_name = {one: text for names, text in texts.items() for one in names.split()}
    return by_name.get(name) or by_name.get(name.rpartition(".")[2], "")


def _is_of_rule(name: str) -> bool:
    section, _, last = name.rpartition(".")
    return section.startswith("optim") and last not in OPTIM_FIELDS


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
