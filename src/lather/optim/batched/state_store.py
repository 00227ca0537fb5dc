"""`StateStore`: the optimizer state of all parameters, in buckets.

`optimizer.state[p]` holds `step` and views of the stacks in which a bucket keeps the state of all
its members. For a parameter that is spread over ranks, a rank keeps the state of the matrices that
it owns, under the same keys as every other rank; the tensors are empty if it owns none.

A state dict from before the first step is memory that a checkpoint is loaded into. A copy of the
state might not fit beside it, so the DTensors in this state dict may be views of the state itself:
the state is lent. Loading exactly these DTensors makes the lent state the optimizer's again; a step
before that moves the state elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lather.boxes import Piece, local
from lather.optim.batched.buckets import (
    Bucket,
    Member,
    States,
    host_memory,
    make_buckets,
    move_to,
)
from lather.optim.batched.optional_entries import fit_optional, with_optional
from lather.optim.batched.pinned import is_offloaded
from lather.optim.batched.plan import places_of
from lather.optim.batched.remainders import REMAINDER, check_remainder, fit_remainder
from lather.optim.batched.roster import ParamInfo, Roster
from lather.optim.batched.step_counts import new_counts
from lather.optim.sharded.replicated import check_rows, initial_rows
from lather.optim.sharded.sharding import Sharding

MutableStates = MutableMapping[Tensor, dict[str, Tensor]]
"""`optimizer.state`, which the user may change or replace, too."""

Saved = Mapping[Tensor, Mapping[str, Any]]
"""Parameter -> its saved state."""


class StateStore:
    """The buckets in which the state of an optimizer is kept. The state itself belongs to the
    optimizer, and is given to the methods."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.buckets: list[Bucket] = []
        self.roster: Roster | None = None
        """The roster for which the buckets were made or checked."""
        self.places: list[Any] | None = None
        """Places of all tensors of the state when they were known to be views of the buckets."""
        self.is_lent = False
        """Whether DTensors of a state dict may be views of state that no step has changed yet."""

    def create(
        self,
        infos: Sequence[ParamInfo],
        state: MutableStates,
        steps: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Create the initial state of those of the parameters that have none. `steps`: parameter ->
        its step count, if it is not 0."""
        steps = steps or {}
        members, entries = list[Member](), dict[Tensor, dict[str, Tensor]]()
        for info in infos:
            if state.get(info.param):
                continue
            member = self._sharding.member_of(info)
            if member is not None:
                members.append(member)
            entries[info.param] = {} if member is not None else _without_member(info)
        if not entries:
            return
        buckets = make_buckets(members, {id(p): int(step) for p, step in steps.items()})
        host = host_memory(buckets)
        for bucket in buckets:
            for member, views in zip(bucket.members, bucket.allocate(host), strict=True):
                entries[member.param] = views
        self.buckets += buckets
        for info in infos:
            if info.param in entries:
                _fit_remainder(info, entries[info.param])
        counts = new_counts([float(steps.get(p, 0)) for p in entries])
        for p, count in zip(entries, counts, strict=True):
            state[p] = {"step": count, **entries[p]}
        self.places = None  # nobody has looked at the other state

    def members(self) -> dict[int, Member]:
        """Return the members of all buckets by the id of their parameter."""
        return {id(member.param): member for bucket in self.buckets for member in bucket.members}

    def bring_up_to_date(self, roster: Roster, state: MutableStates) -> None:
        """Make new buckets for state that is no longer a view of a bucket (it was loaded,
        unpickled, moved, replaced or deleted), or if an option on which layouts depend has changed.
        Raises ValueError for state that does not fit, before anything changes.
        """
        if self.roster is roster and self.places is not None and self.places == places_of(state):
            return
        infos = [info for info in roster.params if state.get(info.param)]
        members = filter(None, map(self._sharding.member_of, infos))
        moved = {id(member.param): member for member in members}
        with_member = set(moved)
        current = []
        for bucket in self.buckets:
            if _is_current(bucket, moved, state):
                current.append(bucket)
                for member in bucket.members:
                    del moved[id(member.param)]
        fit_optional(infos, moved.values(), state)
        _check_parts(infos, moved.values(), state)
        for info in infos:
            if id(info.param) not in with_member:
                _convert_without_member(info, state)
            _bring_step_to_cpu(state[info.param])
            _fit_remainder(info, state[info.param])
        steps = {key: int(state[member.param]["step"]) for key, member in moved.items()}
        new = make_buckets(moved.values(), steps) if moved else []
        host = host_memory(new)
        self.buckets = current
        for bucket in new:
            bucket.stack(state, host)
            self.buckets.append(bucket)
        self.roster, self.places = roster, places_of(state)

    def has_formats(self, roster: Roster, state: States) -> bool:
        """Whether all state has the formats of its layout, which an option may have changed."""
        infos = ((info.layout, state.get(info.param)) for info in roster.params)
        return all(
            layout.formats_of(x) == layout.formats and with_optional(layout, x) is x
            for layout, x in infos
            if x
        )

    def pieces(self, roster: Roster, state: States) -> Iterator[tuple[Tensor, Piece]]:
        """Yield the state on this rank as pieces of whole entries, each with its parameter."""
        members, infos = self.members(), {info.param: info for info in roster.params}
        for p, entries in state.items():
            member, share, layout = members.get(id(p)), self._sharding.share_of(p), infos[p].layout
            for key, value in entries.items():
                offset, shape = (0,) * value.dim(), tuple(value.shape)
                if key == REMAINDER and share is not None:
                    offset, shape = (*share.spread.box.offset, 0), (*share.spread.shape, 2)
                elif key != "step" and share is not None:
                    entry = layout.entries[key]
                    shape = layout.shape_of(entry)
                    if share.is_replicated:
                        offset = share.spread.rows(shape).box.offset
                    elif member is None:
                        continue
                    elif share.elementwise:
                        offset = layout.box_of(entry, share.region).offset
                    elif layout.batch_dim is not None:
                        for row, number in zip(value.split(1), member.numbers, strict=True):
                            yield p, Piece(key, row, (number, *offset[1:]), shape)
                        continue
                yield p, Piece(key, value, offset, shape)

    def whole(self, infos: Sequence[ParamInfo], state: States) -> dict[Tensor, dict[str, Tensor]]:
        """Return the state of those of the parameters that are spread over ranks, as DTensors; lend
        it before the first step. All ranks of their meshes call this together."""
        spread = [info for info in infos if info.spread is not None and state.get(info.param)]
        if not spread:
            return {}
        from lather.optim.sharded.entries import whole_entries  # imports DTensor

        is_new = not any(entries.get("step", 0) for entries in state.values())
        self.is_lent = self.is_lent or is_new
        states = [(info, state[info.param]) for info in spread]
        whole = whole_entries(states, self._sharding, lend=is_new)
        return {p: {"step": state[p]["step"].clone(), **whole[p]} for p in whole}

    def take_back(self, roster: Roster, state: MutableStates) -> StateStore:
        """Move lent state, so that steps do not change what a state dict contains, and return the
        store for it."""
        for info in roster.params:
            entries = state.get(info.param)
            if info.is_replicated and entries:
                state[info.param] = {name: x.clone() for name, x in entries.items()}
            elif entries and REMAINDER in entries:
                entries[REMAINDER] = entries[REMAINDER].clone()
        return StateStore(self._sharding)

    def load(
        self, roster: Roster, state: MutableStates, saved: Saved, lender: Lender | None
    ) -> None:
        """Copy the saved state of parameters into new buckets. All ranks over which parameters are
        spread call this together."""
        infos = [info for info in roster.params if info.param in saved]
        steps = {info.param: step_on_cpu(saved[info.param]["step"]).clone() for info in infos}
        spread = [
            (info, dict(saved[info.param]))
            for info in infos
            if self._sharding.share_of(info.param) is not None
        ]
        if lender is not None and spread and lender.has_lent(infos, spread, self._sharding):
            for info in infos:
                state[info.param] = {**lender.states[info.param], "step": steps[info.param]}
            self.buckets = lender.buckets
            self.bring_up_to_date(roster, state)
        self.create(infos, state, steps)
        for info in infos:
            if self._sharding.share_of(info.param) is None:
                for name in state[info.param].keys() & saved[info.param].keys() - {"step"}:
                    state[info.param][name].copy_(saved[info.param][name])
        if spread:
            from lather.optim.sharded.entries import load_entries

            load_entries(spread, state, self._sharding)


class Lender:
    """State of which a state dict has lent rows. If exactly these are loaded, the load continues
    with it: a second state might not fit into memory."""

    def __init__(self, store: StateStore, infos: Sequence[ParamInfo], state: States) -> None:
        self.states, self.buckets = dict(state), store.buckets
        self._forms = {info.param: _form(info) for info in infos}

    def has_lent(
        self,
        infos: Sequence[ParamInfo],
        saved: Sequence[tuple[ParamInfo, dict[str, Any]]],
        sharding: Sharding,
    ) -> bool:
        """Whether the saved entries of `saved` are rows that this state has lent, and the state of
        all parameters (`infos`) still has the right form."""
        from lather.optim.sharded.entries import are_lent

        is_same = all(
            info.param in self.states and self._forms.get(info.param) == _form(info)
            for info in infos
        )
        return is_same and are_lent(saved, self.states, sharding)


def _form(info: ParamInfo) -> tuple[object, ...]:
    """Return everything on which the form of a parameter's state on a rank depends."""
    form = info.layout, info.layout.entries, info.is_replicated, info.rule.offload
    return *form, info.param.device


def _without_member(info: ParamInfo) -> dict[str, Tensor]:
    """Return the entries of a parameter without member on this rank: rows under
    `ownership="replicated"`, otherwise empty tensors."""
    if info.is_replicated:
        return initial_rows(info)
    device = info.param.device
    home = "cpu" if is_offloaded(info.rule, device) else device
    return {
        name: torch.empty(0, dtype=entry.dtype, device=home)
        for name, entry in info.layout.entries.items()
    }


def _check_parts(infos: Iterable[ParamInfo], members: Iterable[Member], state: States) -> None:
    """Raise ValueError for state on this rank that fits neither its parameter nor its member."""
    for member in members:
        member.layout.check_state(
            state[member.param], f"the state of a parameter of shape {member.layout.shape}"
        )
    for info in infos:
        shape = tuple(local(info.param).shape)
        check_remainder(state[info.param], shape, f"the state of a parameter of shape {shape}")
        if info.is_replicated:
            check_rows(info, state[info.param])


def _convert_without_member(info: ParamInfo, state: MutableStates) -> None:
    """Convert the state of a parameter without member on this rank to the formats of its layout."""
    entries = state[info.param]
    if info.is_replicated:
        converted = _converted_rows(info, entries)
    elif entries.keys() - {REMAINDER} == {"step", *info.layout.entries} and all(
        entries[key].dtype == x.dtype for key, x in info.layout.entries.items()
    ):
        return
    else:
        others = {key: x for key, x in entries.items() if key in {"step", REMAINDER}}
        converted = {**others, **_without_member(info)}
    if converted is not entries:
        state[info.param] = dict(converted)


def _converted_rows(info: ParamInfo, entries: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert this rank's rows of a state; the same object if they are in the right formats. All
    ranks of the mesh call this together."""
    if info.layout.formats_of(entries) == info.layout.formats:
        return entries
    from lather.torch_private import dtensor_over  # imports DTensor

    assert info.spread is not None
    spread_entries = dict(entries)
    for key, x in info.layout.stored_in(entries).items():
        like = torch.empty(info.layout.shape_of(x), device="meta")
        rows = info.spread.rows(tuple(like.shape))
        assert rows.mesh is not None
        spread_entries[key] = dtensor_over(entries[key], rows.mesh, rows.placements, like)
    return {key: local(x) for key, x in info.layout.converted(spread_entries).items()}


def _is_current(bucket: Bucket, members: Mapping[int, Member], state: States) -> bool:
    """Whether the bucket still has the right members and form, and the state of its members."""
    for member in bucket.members:
        new, layout = members.get(id(member.param)), member.layout
        form = layout, bucket.entries, type(layout.rule), bucket.param_dtype, bucket.device
        if new is None or (*form, bucket.offloaded) != (
            *(new.layout, new.layout.entries, type(new.layout.rule)),
            *(new.param.dtype, new.device, is_offloaded(new.layout.rule, new.device)),
        ):
            return False
    return bucket.is_stacked(state)


def _fit_remainder(info: ParamInfo, state: dict[str, Tensor]) -> None:
    fit_remainder(state, local(info.param), keeps=info.layout.keeps_remainder)


def _bring_step_to_cpu(state: dict[str, Any]) -> None:
    """Make the step count of a parameter what torch's optimizers have; a tensor stays the same
    object."""
    before, step = state["step"], step_on_cpu(state["step"])
    if step is not before and not (isinstance(before, Tensor) and move_to(before, step)):
        state["step"] = step


def step_on_cpu(step: Any) -> Tensor:
    """Return a step count, given as a number or a tensor anywhere, as torch's optimizers keep
    it."""
    if hasattr(step, "full_tensor"):
        step = step.full_tensor()
    return torch.as_tensor(step, device="cpu").detach().to("cpu", torch.float32)
