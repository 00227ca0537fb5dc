"""The plan of a step: which rows of which buckets are updated together, in which chunks, and what
ranks exchange.

A plan is made when parameters, options other than numbers, or the set of existing gradients have
changed; every step then executes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lather.boxes import local
from lather.optim.batched.buckets import States
from lather.optim.batched.chunks import chunks_of
from lather.optim.batched.roster import ParamInfo, Roster
from lather.optim.batched.runs import MemberRun
from lather.optim.batched.step_counts import are_side_by_side, step_counts
from lather.optim.sharded.exchange import OwnerExchange
from lather.torch_private import foreach_add_


class StepPlan:
    """The runs, chunks and exchanges of a step, kept for as long as steps do the same. It has no
    tensors but the parameters and their step counts."""

    def __init__(
        self,
        roster: Roster,
        infos: Sequence[ParamInfo],
        runs: list[MemberRun],
        exchanges: list[OwnerExchange],
        state: States,
    ) -> None:
        """Make the plan of the parameters of the roster that take the step (`infos`), whose state
        has been created."""
        self._roster, self._pattern, self._ids = roster, roster.pattern, list(map(id, infos))
        self.chunks, self.exchanges = chunks_of(runs), exchanges
        self.params = [info.param for info in infos]
        self.buckets = list({id(run.bucket): run.bucket for run in runs}.values())
        self.visitors = [
            chunk for run in runs if run.bucket.offloaded for chunk in self.chunks[run]
        ]
        """Chunks whose state visits the device."""
        if len(devices := {chunk.bucket.device for chunk in self.visitors}) > 1:
            raise ValueError(
                f"offload=True with parameters on {', '.join(sorted(map(str, devices)))}: make an "
                "optimizer for the parameters of each device"
            )
        self.replicated = [info for info in infos if info.is_replicated and info.param.numel()]
        """Parameters that every rank gathers and updates (`ownership="replicated"`)."""
        spread = [info for info in infos if info.spread is not None]
        steps = step_counts(spread, state)
        first = {(id(info.settings), steps[id(info)]): info for info in spread}
        self.intervals = [
            (info, t)
            for (_, t), info in first.items()
            if callable(getattr(info.rule, "precondition_frequency", None))
        ]
        """A parameter of each group whose refresh interval is a function, and the number of steps
        that it had taken when this plan was made. All ranks call the function, even those that
        refresh nothing."""
        self._counts = [state[p]["step"] for p in self.params]
        self._together = are_side_by_side(self._counts)
        self._steps = torch.stack(self._counts) if infos else torch.zeros(0, device="cpu")
        """Values of the step counts."""
        self.num_steps = 0
        """Number of steps that this plan has taken."""
        self.idle: dict[int, list[bool]] = {}
        """id of a parameter with experts -> for each expert, whether it got no token in this
        step."""

    def holds(
        self, roster: Roster, infos: list[ParamInfo], state: States, places: list[Any] | None
    ) -> bool:
        """Whether the plan is that of a step of these parameters: groups with equal settings are
        still equal, and the state is where it was when the plan was made, at `places`, with the
        step counts of the plan's last step."""
        if roster is not self._roster or roster.pattern != self._pattern:
            return False
        if list(map(id, infos)) != self._ids or places is None or places_of(state) != places:
            return False
        if self._together:
            return torch.equal(self._counts[0].as_strided(self._steps.shape, (1,)), self._steps)
        return not self._counts or torch.equal(torch.stack(self._counts), self._steps)

    def count_step(self) -> None:
        """Add one to the step counts of all parameters."""
        self.num_steps += 1
        if self._together:
            self._counts[0].as_strided(self._steps.shape, (1,)).add_(1)
        elif self._counts:
            foreach_add_(self._counts, 1)
        self._steps += 1


def is_unchanged(roster: Roster, groups: Sequence[dict[str, Any]]) -> bool:
    """Whether the roster is still that of these parameter groups; it then has the numbers of this
    step."""
    if not roster.is_current or list(map(id, groups)) != roster.group_ids:
        return False
    is_same = True
    for settings in roster.groups:
        group = settings.group
        if group.keys() != settings.keys or list(map(id, group["params"])) != settings.ids:
            return False
        try:
            is_same = is_same and bool(group["lr"] == settings.lr)
            is_same = is_same and list(map(group.get, settings.names)) == settings.values
        except (RuntimeError, ValueError):  # an array of several elements has no truth value
            return False
    if not is_same or weight_places(roster.params) != roster.places:
        roster.is_current = False  # also if a value is refused
        if not roster.read_numbers():
            return False
        roster.places, roster.is_current = weight_places(roster.params), True
    return not (roster.frozen and any(p.requires_grad or p.grad is not None for p in roster.frozen))


def weight_places(infos: Sequence[ParamInfo]) -> list[Any]:
    """Return the memory addresses, strides and sizes of the parameters."""
    tensors = [info.param if info.spread is None else local(info.param) for info in infos]
    return [
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.stride, tensors),
        *map(Tensor.numel, tensors),
    ]


def places_of(state: States) -> list[Any] | None:
    """Return the identity, the address and the offset in its storage of each tensor of the state,
    which show whether anybody has moved or replaced it. None if the state has anything but
    tensors."""
    try:
        tensors = list(chain.from_iterable(map(dict.values, state.values())))
        return [
            *map(id, tensors),
            *map(Tensor.data_ptr, tensors),
            *map(Tensor.storage_offset, tensors),
        ]
    except TypeError:
        return None
