"""Entries that the state has under some options alone (`Rule.optional_entries`): a state from
before a change of these options gets them, or loses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lather.optim.batched.buckets import Member
from lather.optim.batched.formats import DIAGONAL, ENCODED, SCALE
from lather.optim.batched.matrix_layout import Layout
from lather.optim.batched.roster import ParamInfo
from lather.optim.sharded.replicated import initial_rows


def with_optional(layout: Layout, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without the optional entries that the layout does not have, and with initial
    ones, on the CPU, in the place of those that it lacks; the same object if it has the right
    ones."""
    names, ends = layout.rule.optional_entries, ("", ENCODED, SCALE, DIAGONAL)
    unwanted = [name for name in names if name not in layout.formats]
    surplus = {f"{name}{end}" for name in unwanted for end in ends} & state.keys()
    forms = [layout.formats[name] for name in names if name in layout.formats]
    lacking = [form for form in forms if form.in_state(state).key not in state]
    if not surplus and not lacking:
        return state
    made = (form.allocate(layout.batch, torch.device("cpu")) for form in lacking)
    return {key: x for key, x in state.items() if key not in surplus} | {
        key: x.view(layout.shape_of(layout.entries[key]))
        for stacks in made
        for key, x in stacks.items()
    }


def fit_optional(
    infos: Iterable[ParamInfo],
    members: Iterable[Member],
    state: MutableMapping[Tensor, dict[str, Tensor]],
) -> None:
    """Give the state on this rank the optional entries of its layouts."""
    layouts = {member.param: member.layout for member in members}
    for info in infos:
        layout = info.layout if info.is_replicated else layouts.get(info.param)
        entries = state[info.param]
        if layout is None or (fitted := with_optional(layout, entries)) is entries:
            continue
        if info.is_replicated and (added := fitted.keys() - entries.keys()):
            rows = initial_rows(info)
            fitted = {**fitted, **{key: rows[key] for key in added}}
        state[info.param] = dict(fitted)
