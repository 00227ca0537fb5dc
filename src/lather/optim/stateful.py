"""`StatefulOptimizer`: what an optimizer of the family keeps, in buckets, and how it is saved and loaded.

`optimizer.state[p]` holds `step` and views of the stacks in which a bucket keeps the state of all its members. Of a parameter that is
spread over ranks a rank keeps what it owns, maybe nothing, under the same keys as everybody. `state_dict` gives the entries of such
parameters as DTensors cut along dim 0, whatever the plan of owners was, so that torch's tools for distributed checkpoints can take and
reshard them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.buckets import Bucket, check_state, make_buckets
from lather.optim.members import Member, member_of
from lather.optim.options import dtype_option, saveable
from lather.optim.precision import SideStreams, join, matmul_precision, no_autocast
from lather.optim.refresh import Launched, Stagger, finish
from lather.optim.sharding import Sharding
from lather.optim.state import StatePiece, kept_shape, state_entries


class StatefulOptimizer(torch.optim.Optimizer):
    """State in buckets."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], tp_group: dist.ProcessGroup | None = None) -> None:
        self._buckets: list[Bucket] = []
        self._stagger: Stagger | None = None
        self._streams = SideStreams()
        self._counts: dict[str, int] = {}
        self._refreshing: list[tuple[str, Launched]] = []
        self._sharding = Sharding(tp_group)
        super().__init__(params, defaults)

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of every parameter that has none, as it is before the first gradient (for loading checkpoints)."""
        self._plan()
        self._create_state([(p, group) for group in self.param_groups for p in group["params"]])

    def _plan(self) -> None:
        """Owners for the parameters that are spread over ranks, all of which call this."""
        self._sharding.plan([(p, group) for group in self.param_groups for p in group["params"]])

    def _create_state(self, params: list[tuple[Tensor, dict[str, Any]]]) -> None:
        new = [(p, group) for p, group in params if not self.state.get(p)]
        found = [member_of(p, group, self._sharding.share_of(p)) for p, group in new]
        buckets = make_buckets(member for member in found if member is not None)
        entries = {p: self._without_member(p, group) for (p, group), member in zip(new, found, strict=True) if member is None}
        for bucket in buckets:
            entries |= {member.param: views for member, views in zip(bucket.members, bucket.views, strict=True)}
        self._buckets += buckets
        for p, _ in new:
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32), **entries[p]}

    def _without_member(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The entries of a parameter of which this rank owns no matrix: nothing, or rows."""
        if self._is_gathered(p):
            from lather.optim.gathered import initial_rows  # imports DTensor

            return initial_rows(p, group, self._sharding)
        layout = self._sharding.layout_of(p, group)
        return {name: torch.empty(0, dtype=entry.dtype, device=p.device) for name, entry in state_entries(layout, group).items()}

    def _members(self) -> dict[int, Member]:
        """By the id of the parameter."""
        return {id(member.param): member for bucket in self._buckets for member in bucket.members}

    def _bring_buckets_up_to_date(self) -> None:
        """State is stacked anew if some of it is not a view of a bucket (it was loaded, unpickled, replaced or deleted), or if an option on
        which layouts depend was changed. Raises ValueError, before it changes anything, for state that no longer fits.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if self._is_gathered(p) and self.state.get(p):
                    for name, entry in state_entries(self._sharding.layout_of(p, group), group).items():
                        self.state[p][name] = self.state[p][name].to(entry.dtype)
        kept = [(p, group) for group in self.param_groups for p in group["params"] if self.state.get(p) and self._owns(p)]
        groups = {id(group) for group in self.param_groups}
        current = [
            all(self.state.get(member.param, {}).get(name) is view for name, view in views.items())
            and id(member.group) in groups
            and made_for == member.made_for()
            for bucket in self._buckets
            for member, views, made_for in zip(bucket.members, bucket.views, bucket.made_for, strict=True)
        ]
        if all(current) and len(current) == len(kept):
            return
        members = [member_of(p, group, self._sharding.share_of(p)) for p, group in kept]
        for member in members:
            assert member is not None
            check_state(self.state[member.param], member.layout, member.group, f"the state of a parameter of shape {member.shape}")
        self._buckets = make_buckets(
            (member for member in members if member is not None), apart={id(p): int(self.state[p]["step"]) for p, _ in kept}
        )
        for bucket in self._buckets:
            for member, views in zip(bucket.members, bucket.views, strict=True):
                for name, view in views.items():
                    view.copy_(self.state[member.param][name])
                    self.state[member.param][name] = view

    def _finish_refreshes(self) -> None:
        """Wait for those under way (`async_refresh`): before anything reads or changes the state."""
        join(self._streams)
        refreshing, self._refreshing = self._refreshing, []
        for precision, launched in refreshing:
            with matmul_precision(precision), no_autocast({batch.run.bucket.device.type for batch, _ in launched}):
                finish(launched, self._count)

    def _owns(self, p: Tensor) -> bool:
        share = self._sharding.share_of(p)
        return share is None or bool(share.own)

    def _is_gathered(self, p: Tensor) -> bool:
        share = self._sharding.share_of(p)
        return share is not None and share.is_gathered

    def state_pieces(self) -> Iterator[StatePiece]:
        """What this rank keeps, as boxes of whole entries: for checkpoints of one's own. Nothing is copied and nothing travels."""
        self._finish_refreshes()
        members = self._members()
        for p, state in self.state.items():
            member, share = members.get(id(p)), self._sharding.share_of(p)
            for key, value in state.items():
                if key == "step" or share is None:
                    yield StatePiece(p, key, value, (0,) * value.dim(), tuple(value.shape))
                elif share.is_gathered:
                    yield self._piece_of_rows(p, key, value)
                elif member is not None:
                    entry = state_entries(share.layout, member.group)[key]
                    shape = kept_shape(key, entry, share.layout)
                    if share.elementwise:
                        yield StatePiece(p, key, value, share.region.offset, shape)
                    elif share.layout.kind == "per_expert":
                        for slot, number in enumerate(member.numbers):
                            yield StatePiece(p, key, value[slot : slot + 1], (number, *(0,) * (value.dim() - 1)), shape)
                    else:
                        yield StatePiece(p, key, value, (0,) * value.dim(), shape)

    def _piece_of_rows(self, p: Tensor, key: str, rows: Tensor) -> StatePiece:
        from lather.optim.gathered import rows_of

        group = next(group for group in self.param_groups if any(p is q for q in group["params"]))
        layout = self._sharding.layout_of(p, group)
        shape = kept_shape(key, state_entries(layout, group)[key], layout)
        return StatePiece(p, key, rows, rows_of(p, group, self._sharding, shape).box.offset, shape)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, without options that are functions: like those of torch's learning-rate schedulers, they are not saved. dtypes are
        saved by name.

        Entries of parameters that are spread over ranks are DTensors on their mesh, cut along dim 0: all its ranks call this together.
        """
        self._finish_refreshes()
        own = dict(self.state)
        try:
            if spread := self._spread_state():
                from lather.optim.entries import whole_entries  # imports DTensor

                self.state.update({p: {**own[p], **entries} for p, entries in whole_entries(spread, self._sharding).items()})
            saved = super().state_dict()
        finally:
            self.state.update(own)
        groups = [{key: saveable(value) for key, value in group.items() if not callable(value)} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    def _spread_state(self) -> list[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        """(parameter, its group, its state) of those that are spread over ranks."""
        return [
            (p, group, self.state[p])
            for group in self.param_groups
            for p in group["params"]
            if self.state.get(p) and self._sharding.share_of(p) is not None
        ]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load bit for bit: torch's own casts state to the parameter's dtype, which would ruin fp32 factors of bf16 parameters.

        The exact values go in between the caller's pre-hooks and post-hooks, on top of what torch has loaded. A state that does not fit
        the parameters raises ValueError, and nothing has been changed. Of parameters that are spread over ranks all their ranks call this,
        with whole entries or with DTensors.
        """
        final: dict[str, Any] = {}
        self._finish_refreshes()
        self._plan()

        def note(_: torch.optim.Optimizer, after_hooks: dict[str, Any]) -> dict[str, Any]:
            final.update(self._checked(after_hooks))
            return final

        handles = [
            self.register_load_state_dict_pre_hook(note),
            self.register_load_state_dict_post_hook(lambda _: self._load_exactly(final), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A saved optimizer, with the options of this one where it has none, and this one's way to keep state; raises ValueError if it does
        not fit."""
        counts = [[len(group["params"]) for group in groups] for groups in (self.param_groups, saved["param_groups"])]
        if counts[0] != counts[1]:
            raise ValueError(
                f"the saved optimizer has parameter groups of {counts[1]} parameters, this one of {counts[0]}: they must be equal"
            )
        own = [{key: group[key] for key in self.defaults} for group in self.param_groups]
        groups = [
            {**options, **theirs, "ownership": options["ownership"]} for options, theirs in zip(own, saved["param_groups"], strict=True)
        ]
        groups = [{**group, "state_dtype": dtype_option(group["state_dtype"])} for group in groups]
        checked = {**saved, "param_groups": groups}
        for number, (p, group, state) in enumerate(self._saved_states(checked)):
            if state:
                layout = self._sharding.layout_of(p, group)
                check_state(state, layout, group, f"the saved state of parameter {number} with shape {layout.shape}")
        return checked

    def _load_exactly(self, saved: dict[str, Any]) -> None:
        self._sharding.forget_changed([(p, group) for group in self.param_groups for p in group["params"]])
        self._plan()
        spread = []
        for p, group, state in self._saved_states(saved):
            if state and self._sharding.share_of(p) is not None:
                self.state[p] = {"step": _step_of(state)}
                spread.append((p, group, state))
                continue
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.detach().to("cpu" if key == "step" else p.device, copy=True)
                else:
                    self.state[p][key] = deepcopy(value)
        if spread:
            from lather.optim.entries import load_entries

            for p, entries in load_entries(spread, self._sharding).items():
                self.state[p] |= entries
        self._reset_buckets()
        self._bring_buckets_up_to_date()

    def _saved_states(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        """(parameter, its saved group, its saved state)."""
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            where = {key: group[key] for key in ("partition_dim",) if key in group}
            for p, saved_id in zip(group["params"], saved_group["params"], strict=True):
                options = {key: saved_group.get(key, default) for key, default in self.defaults.items()}
                yield p, {**options, **where}, state_dict["state"].get(saved_id, {})

    def _reset_buckets(self) -> None:
        self._buckets, self._stagger, self._streams, self._refreshing = [], None, SideStreams(), []

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_buckets()
        self.__dict__.setdefault("_counts", {})
        self.__dict__.setdefault("_sharding", Sharding(None))
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        """Views become tensors of their own: pickle would write the whole stack for each."""
        if self._spread_state():
            raise TypeError(
                "an optimizer of parameters that are spread over ranks cannot be pickled or copied: process groups cannot; "
                "save its state_dict() with torch.distributed.checkpoint"
            )
        self._finish_refreshes()
        state = super().__getstate__()
        apart = {p: {key: x.clone() if isinstance(x, Tensor) else x for key, x in entries.items()} for p, entries in state["state"].items()}
        return {**state, "state": defaultdict(dict, apart), "_counts": self._counts}

    @property
    def counters(self) -> dict[str, int]:
        """Since construction, on this rank: factors refreshed; skipped by the criterion or for want of tokens; retried by QR after
        Cholesky-QR; failed, so that their basis stays; and gradients skipped. Refreshes under way (`async_refresh`) count once they end."""
        names = ("refreshes_done", "refreshes_skipped", "refreshes_retried", "refreshes_failed", "nonfinite_skipped")
        return {name: self._counts.get(name, 0) for name in names}

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more


def _step_of(saved: Mapping[str, Any]) -> Tensor:
    step = saved["step"]
    step = step.full_tensor() if hasattr(step, "full_tensor") else torch.as_tensor(step)
    return step.detach().to("cpu", torch.float32, copy=True)
