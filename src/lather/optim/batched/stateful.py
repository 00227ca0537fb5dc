"""`StatefulOptimizer`: an optimizer that consists of parts, and how its state is saved and loaded.

    RuleGroups        the rules of its parameter groups, and the roster of their parameters
    StateStore        the state of the parameters, in buckets
    StepPlan          what a step does; made by the step (`lather.optim.batched.optimizer`)
    PendingRefreshes  the refreshes that are done between two steps

`state_dict` returns the entries of parameters that are spread over ranks as DTensors that are
sharded along dim 0, whichever ranks own the matrices, so that torch's tools for distributed
checkpoints can reshard them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.boxes import Piece
from lather.optim.batched.arguments import Published
from lather.optim.batched.buckets import Bucket, States
from lather.optim.batched.foreign_state import as_own, report_taken, taken
from lather.optim.batched.matrix_layout import Layout
from lather.optim.batched.pending import PendingRefreshes
from lather.optim.batched.plan import StepPlan
from lather.optim.batched.refresh import Counts
from lather.optim.batched.roster import ParamInfo, Roster
from lather.optim.batched.rule_groups import RuleGroups, whole_layout
from lather.optim.batched.state_store import StateStore, step_on_cpu
from lather.optim.batched.streams import SideStreams
from lather.optim.options import options_of
from lather.optim.plain import is_placeholder, saveable
from lather.optim.rule import Rule
from lather.torch_private import is_flattened


@dataclass(frozen=True)
class Lent:
    """State whose rows `state_dict` has lent, with what is needed to go on with it."""

    params: Mapping[Tensor, ParamInfo]
    states: Mapping[Tensor, dict[str, Tensor]]
    buckets: list[Bucket]


class StatefulOptimizer(torch.optim.Optimizer):
    """Optimizer with parameter groups that have rules (`RuleGroups`), and whose state is kept in
    buckets."""

    published: ClassVar[Published] = {}
    """Names of the published interface for options, which arguments and groups may use."""

    def __init__(self, params: ParamsT, rule: Rule) -> None:
        self._plan: StepPlan | None = None
        self._store = StateStore()
        self._streams = SideStreams()
        self._is_lent = False
        """Whether DTensors of `state_dict` may be views of state that no step has changed yet."""
        self._counts = Counts()
        self._pending = self._no_refreshes()
        self._groups = RuleGroups(rule, self.published)
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params is a model, {type(params).__name__}: give parameter_groups(model), "
                "or model.parameters() for one rule on all parameters"
            )
        super().__init__(params, self._groups.defaults)
        self._groups.complete(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad option, layout or parameter raises before
        the group is added.

        A parameter that is given twice (tied weights) counts once. Keys that are no options are
        kept and ignored, unless they ask for another rule or step, or look like misspelt options,
        which raise (`lather.optim.batched.group_keys`).
        """
        self._groups.add(param_group, self.param_groups, super().add_param_group)

    def _current_roster(self) -> Roster:
        return self._groups.current_roster(self.param_groups, self.state)

    def _no_refreshes(self) -> PendingRefreshes:
        owner = weakref.ref(self)  # otherwise optimizer and refreshes would form a cycle

        def state() -> States:
            optimizer = owner()
            return {} if optimizer is None else optimizer.state

        return PendingRefreshes(self._counts, state)

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the initial state of every parameter that has none, for example before a
        checkpoint is loaded."""
        self._store.create(self._current_roster().params, self.state, self._groups.sharding)

    def state_pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        """Yield the state on this rank as pieces of whole entries, each with its parameter, for
        other checkpoint formats. Nothing is copied or sent between ranks."""
        self._pending.finish()
        members, infos = (
            self._store.members(),
            {id(one.param): one for one in self._current_roster().params},
        )
        for p, state in self.state.items():
            member, share, one = members.get(id(p)), self._groups.sharding.share_of(p), infos[id(p)]
            for key, value in state.items():
                offset, shape = (0,) * value.dim(), tuple(value.shape)
                if key != "step" and share is not None:
                    shape = one.layout.shape_of(one.layout.entries[key])
                    if share.is_gathered:
                        offset = share.spread.rows(shape).box.offset
                    elif member is None:
                        continue
                    elif share.elementwise:
                        offset = share.region.offset
                    elif one.layout.per_expert:
                        for slot, number in enumerate(member.numbers):
                            yield (
                                p,
                                Piece(key, value[slot : slot + 1], (number, *offset[1:]), shape),
                            )
                        continue
                yield p, Piece(key, value, offset, shape)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the same as torch's `state_dict`, but with dtypes as names, and with an empty dict
        in the place of each function.

        Functions are not saved, like those of torch's learning-rate schedulers. But a loader that
        flattens state dicts expects all keys of its groups. Distributed checkpoints leave empty
        dicts out when they save, and do not ask for them when they load.

        Entries of parameters that are spread over ranks are DTensors on the parameter's mesh,
        sharded along dim 0: all ranks of the mesh must call this together.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        if any(map(is_flattened, params)) or not any(p.dim() > 1 for p in params):
            self._groups.check_whole(self.param_groups)
        self._pending.finish()
        own = dict(self.state)
        try:
            if spread := self._spread_state():
                from lather.optim.sharded.entries import whole_entries  # imports DTensor

                is_new = not any(state.get("step", 0) for state in own.values())
                self._is_lent = self._is_lent or is_new
                entries = whole_entries(spread, self._groups.sharding, lend=is_new)
                self.state.update(
                    {p: {"step": own[p]["step"].clone(), **entries[p]} for p in entries}
                )
            saved = super().state_dict()
        finally:
            self.state.update(own)
        groups = [saveable(group) for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    def _spread_state(self) -> list[tuple[ParamInfo, dict[str, Any]]]:
        """Return the parameters that are spread over ranks, with their state."""
        if not self._groups.sharding.has_shares:
            return []
        roster = self._current_roster()
        return [
            (one, self.state[one.param])
            for one in roster.params
            if one.spread is not None and self.state.get(one.param)
        ]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state exactly. torch's own method would cast it to the parameter's dtype,
        which ruins fp32 factors of bf16 parameters. An option that is a function, here or in the
        saved optimizer, is not loaded.

        The exact values replace those that torch has loaded after the caller's pre-hooks and before
        the post-hooks. A state that does not fit the parameters raises ValueError, and nothing has
        changed. If parameters are spread over ranks, all these ranks must call this together, with
        whole entries or with DTensors.
        """
        final: dict[str, Any] = {}
        self._pending.finish()
        known = {one.param: one for one in self._current_roster().params}
        lent = Lent({}, {}, [])
        if self._is_lent:
            lent = Lent(known, dict(self.state), self._store.buckets)

        def note(_: torch.optim.Optimizer, after_hooks: dict[str, Any]) -> dict[str, Any]:
            final.update(self._checked(after_hooks))
            groups = [_without_functions(group) for group in final["param_groups"]]
            # torch would copy functions, and cast the state and keep both
            return {**final, "param_groups": groups, "state": {}}

        handles = [
            self.register_load_state_dict_pre_hook(note),
            self.register_load_state_dict_post_hook(
                lambda _: self._load_exactly(final, lent), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        # accelerate replaces the parameters before the first step: do not keep the old ones alive
        if not self.state:
            self._groups.roster = None
            self._groups.sharding.forget()

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved optimizer with options that it lacks, and `ownership`, taken from this
        one. Raises ValueError if it does not fit."""
        counts = [
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, saved["param_groups"])
        ]
        if counts[0] != counts[1]:
            raise ValueError(
                f"the saved optimizer has parameter groups of {counts[1]} parameters, this one of "
                f"{counts[0]}: they must be equal"
            )
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        groups = [as_own(own, theirs, self._groups.rules[own["rule"]]) for own, theirs in pairs]
        checked = {**saved, "param_groups": groups, "state": dict(saved["state"])}
        sources = [(theirs, key) for theirs in saved["param_groups"] for key in theirs["params"]]
        states, num_completed = list(self._saved_states(checked)), 0
        for number, (_, layout, state) in enumerate(states):
            if state:
                _check_complete(state, number, layout)
                theirs, saved_id = sources[number]
                what = f"the saved state of parameter {number} with shape {layout.shape}"
                fitting = taken(theirs, layout, state, what)
                num_completed += fitting is not state
                checked["state"][saved_id] = fitting
        for number, (own, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            if own["rule"] != theirs["rule"]:
                raise ValueError(
                    f"the saved group {number} has rule {theirs['rule']!r}, this optimizer's has "
                    f"{own['rule']!r}: they must be equal"
                )
            rule = self._groups.rules[own["rule"]]
            made = rule(**{name: theirs[name] for name in options_of(rule)})
            self._groups.unknown_in(theirs, made, exempt=self.defaults)
        if num_completed:
            report_taken(num_completed)
        return checked

    def _load_exactly(self, saved: dict[str, Any], lent: Lent) -> None:
        """Copy saved state into new buckets. The optimizer has the saved options, and no state."""
        for group, loaded in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if callable(value)})
        states = {p: state for p, _, state in self._saved_states(saved) if state}
        self.state.update({p: {"step": _step_of(state)} for p, state in states.items()})
        self._groups.roster = None
        self._groups.sharding.forget_changed(
            self._groups.make_roster(self.param_groups, self.state).params
        )
        known = [one for one in self._current_roster().params if one.param in states]
        steps = {id(one.param): self.state.pop(one.param)["step"] for one in known}
        spread = [
            (one, states[one.param])
            for one in known
            if self._groups.sharding.share_of(one.param) is not None
        ]
        if spread:
            self._take_room(known, steps, spread, lent)
        self._store.create(known, self.state, self._groups.sharding, steps)
        for one in known:
            if self._groups.sharding.share_of(one.param) is None:
                for name in one.layout.entries:
                    self.state[one.param][name].copy_(states[one.param][name])
        if spread:
            from lather.optim.sharded.entries import load_entries

            load_entries(spread, self.state, self._groups.sharding)
        ids = {index for group in saved["param_groups"] for index in group["params"]}
        self.state.update({key: x for key, x in saved["state"].items() if key not in ids})

    def _take_room(
        self,
        known: list[ParamInfo],
        steps: Mapping[int, Tensor],
        saved: list[tuple[ParamInfo, dict[str, Any]]],
        lent: Lent,
    ) -> None:
        """If the saved entries are the room that was lent (`state_dict` before the first step), go
        on with the state that lent it: a second one might not fit into memory. Only then nothing
        else is overwritten while the state takes the saved values in place."""
        from lather.optim.sharded.entries import are_lent

        is_same = all(
            one.param in lent.states and _form(lent.params[one.param]) == _form(one)
            for one in known
        )
        if not is_same or not are_lent(saved, lent.states, self._groups.sharding):
            return
        for one in known:
            self.state[one.param] = {**lent.states[one.param], "step": steps[id(one.param)]}
        self._store.buckets = lent.buckets
        self._store.bring_up_to_date(self._current_roster(), self.state, self._groups.sharding)

    def _take_back_state(self) -> None:
        """Move lent state, so that what steps change is not what `state_dict` returned."""
        for one in self._current_roster().params:
            if one.is_gathered and (state := self.state.get(one.param)):
                self.state[one.param] = {name: x.clone() for name, x in state.items()}
        self._is_lent, self._store = False, StateStore()

    def _saved_states(
        self, state_dict: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Layout, dict[str, Any]]]:
        """Yield (parameter, its layout with the saved options, its saved state)."""
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            rule = self._groups.rules[group["rule"]]
            try:
                made = rule(
                    **{name: saved_group.get(name, group[name]) for name in options_of(rule)}
                )
            except ValueError:  # options of another rule: `_checked` raises
                made = rule(**{name: group[name] for name in options_of(rule)})
            for p, saved_id in zip(group["params"], saved_group["params"], strict=True):
                yield (
                    p,
                    whole_layout(p, made, self._groups.sharding.spread_of(p, group)),
                    state_dict["state"].get(saved_id, {}),
                )

    def _reset(self) -> None:
        """Forget everything that was made for a state that has been replaced."""
        self._plan, self._store, self._streams = None, StateStore(), SideStreams()
        self._groups.roster, self._is_lent = None, False
        self._pending.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch's load_state_dict calls this, too
        self.__dict__.setdefault("_pending", self._no_refreshes())
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. Views become separate tensors, for otherwise pickle would
        write the whole stack for each."""
        if self._spread_state():
            raise TypeError(
                "an optimizer of parameters that are spread over ranks cannot be pickled or "
                "copied, because process groups cannot; "
                "save its state_dict() with torch.distributed.checkpoint"
            )
        self._pending.finish()
        state = super().__getstate__()
        apart = {
            p: {key: x.clone() if isinstance(x, Tensor) else x for key, x in entries.items()}
            for p, entries in state["state"].items()
        }
        own = {"_counts": self._counts, "_groups": self._groups}
        return {**state, "state": defaultdict(dict, apart), **own}

    @property
    def counters(self) -> dict[str, int]:
        """Counts on this rank since construction: bases that were refreshed; skipped by the
        criterion or because an expert got no token; retried by QR after Cholesky-QR; failed, so
        that the old basis stays; and gradients that were skipped because they were not finite.
        Pending refreshes (`async_refresh`) are not counted yet."""
        names = (
            "refreshes_done",
            "refreshes_skipped",
            "refreshes_retried",
            "refreshes_failed",
            "nonfinite_skipped",
        )
        return {name: self._counts.get(name, 0) for name in names}


def _form(one: ParamInfo) -> tuple[object, ...]:
    """Return everything on which the form of a parameter's state on a rank depends."""
    return one.layout, one.layout.entries, one.is_gathered, one.param.device


def _without_functions(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if not callable(value)}


def _check_complete(state: Mapping[str, Any], number: int, layout: Layout) -> None:
    """Raise ValueError if an entry of a parameter's saved state is an empty dict."""
    if missing := [key for key, value in state.items() if is_placeholder(value)]:
        raise ValueError(
            f"the saved optimizer has no {', '.join(missing)} of parameter {number} with shape "
            f"{layout.shape}. In a flattened state dict, torch puts an empty dict in the place "
            "of what is missing, also with strict=False. Take that from this optimizer instead: "
            "set_optimizer_state_dict(model, optimizer, {**get_optimizer_state_dict(model, "
            "optimizer, options=options), **saved}, options=options)"
        )


def _step_of(saved: Mapping[str, Any]) -> Tensor:
    return step_on_cpu(saved["step"]).clone()
