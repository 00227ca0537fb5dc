"""`StateStore`: the optimizer state of all parameters, in buckets.

`optimizer.state[p]` holds `step` and views of the stacks in which a bucket keeps the state of all
its members. For a parameter that is spread over ranks, a rank keeps the state of the matrices that
it owns, under the same keys as every other rank; the tensors are empty if it owns none.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lather.optim.batched.buckets import Bucket, Member, States, make_buckets, move_to
from lather.optim.batched.plan import places_of
from lather.optim.batched.roster import ParamInfo, Roster
from lather.optim.sharded.gathered import check_rows, initial_rows
from lather.optim.sharded.sharding import Sharding

MutableStates = MutableMapping[Tensor, dict[str, Tensor]]
"""`optimizer.state`, which the user may change or replace, too."""


class StateStore:
    """The buckets in which the state of an optimizer is kept. The state itself belongs to the
    optimizer, and is given to the methods."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.roster: Roster | None = None
        """The roster for which the buckets were made or checked."""
        self.places: list[Any] | None = None
        """Places of all tensors of the state when they were known to be views of the buckets."""

    def create(
        self,
        params: Sequence[ParamInfo],
        state: MutableStates,
        sharding: Sharding,
        steps: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Create the initial state of those of the parameters that have none. `steps`: id of a
        parameter -> its step count, if it is not 0."""
        new = [one for one in params if not state.get(one.param)]
        if not new:
            return
        steps = steps or {}
        found = [sharding.member_of(one) for one in new]
        entries = {
            one.param: _without_member(one)
            for one, member in zip(new, found, strict=True)
            if member is None
        }
        apart = {key: int(step) for key, step in steps.items()}
        buckets = make_buckets((member for member in found if member is not None), apart=apart)
        for bucket in buckets:
            for member, views in zip(bucket.members, bucket.allocate(), strict=True):
                entries[member.param] = views
        self.buckets += buckets
        for one in new:
            step = steps.get(id(one.param), torch.zeros((), dtype=torch.float32, device="cpu"))
            state[one.param] = {"step": step, **entries[one.param]}
        self.places = None  # nobody has looked at the other state

    def members(self) -> dict[int, Member]:
        """Return the members of all buckets by the id of their parameter."""
        return {id(member.param): member for bucket in self.buckets for member in bucket.members}

    def bring_up_to_date(self, roster: Roster, state: MutableStates, sharding: Sharding) -> None:
        """Make new buckets for state that is no longer a view of a bucket (it was loaded,
        unpickled, moved, replaced or deleted), or if an option on which layouts depend has changed.
        Raises ValueError for state that does not fit, before anything changes.
        """
        places = self.places
        if self.roster is roster and places is not None and places == places_of(state):
            return
        known = [(one, state[one.param]) for one in roster.params if state.get(one.param)]
        found = [sharding.member_of(one) for one, _ in known]
        wanted = {id(member.param): member for member in found if member is not None}
        current = []
        for bucket in self.buckets:
            if _is_current(bucket, wanted, state):
                current.append(bucket)
                for member in bucket.members:
                    del wanted[id(member.param)]
        for member in wanted.values():
            member.layout.check_state(
                state[member.param], f"the state of a parameter of shape {member.layout.shape}"
            )
        gathered = [one for one, _ in known if one.is_gathered]
        for one in gathered:
            check_rows(one, state[one.param])
        for one in gathered:
            rows = state[one.param]
            rows.update(
                {name: rows[name].to(entry.dtype) for name, entry in one.layout.entries.items()}
            )
        for _, entries in known:
            _bring_step_to_cpu(entries)
        apart = {key: int(state[member.param]["step"]) for key, member in wanted.items()}
        self.buckets = current
        for bucket in make_buckets(wanted.values(), apart=apart) if wanted else ():
            bucket.stack(state)
            self.buckets.append(bucket)
        self.roster, self.places = roster, places_of(state)


def _without_member(one: ParamInfo) -> dict[str, Tensor]:
    """Return the entries of a parameter without member on this rank: rows under
    `ownership="replicated"`, otherwise empty tensors."""
    if one.is_gathered:
        return initial_rows(one)
    return {
        name: torch.empty(0, dtype=entry.dtype, device=one.param.device)
        for name, entry in one.layout.entries.items()
    }


def _is_current(bucket: Bucket, wanted: Mapping[int, Member], state: States) -> bool:
    """Whether the bucket still has the right members and form, and the state of its members."""
    for member in bucket.members:
        new = wanted.get(id(member.param))
        if new is None or (new.layout, new.layout.entries) != (member.layout, bucket.entries):
            return False
        if type(new.layout.rule) is not type(member.layout.rule):
            return False
        if (new.param.dtype, new.device) != (bucket.param_dtype, bucket.device):
            return False
    return bucket.is_stacked(state)


def _bring_step_to_cpu(state: dict[str, Any]) -> None:
    """Make the step count of a parameter what torch's optimizers have; a tensor stays the same
    object."""
    before, step = state["step"], step_on_cpu(state["step"])
    if step is not before and not (isinstance(before, Tensor) and move_to(before, step)):
        state["step"] = step


def step_on_cpu(step: Any) -> Tensor:
    """Return a step count, given as a number or a tensor anywhere, as torch's optimizers keep
    it."""
    step = (
        step.full_tensor() if hasattr(step, "full_tensor") else torch.as_tensor(step, device="cpu")
    )
    return step.detach().to("cpu", torch.float32)
