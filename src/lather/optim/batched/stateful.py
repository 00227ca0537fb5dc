"""`StatefulOptimizer`: the state of an optimizer as others see it: state dicts, pieces for
checkpoints, copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lather.boxes import Piece
from lather.optim.batched.formats import Formats
from lather.optim.batched.loading import checked, without_values
from lather.optim.batched.pending import PendingRefreshes
from lather.optim.batched.plan import StepPlan
from lather.optim.batched.refresh import Counts
from lather.optim.batched.roster import Roster
from lather.optim.batched.rule_groups import RuleGroups
from lather.optim.batched.state_store import Lender, StateStore
from lather.optim.batched.streams import SideStreams
from lather.optim.batched.visits import wait_for_host
from lather.optim.plain import saveable
from lather.torch_private import is_flattened


class StatefulOptimizer(torch.optim.Optimizer):
    """An optimizer whose state belongs to parameters of several rules, on this rank or on several.
    Its subclass makes the state and changes it."""

    _groups: RuleGroups
    _counts: Counts

    def _forget_state(self) -> None:
        """Make the parts that belong to a state which has been replaced anew."""
        self._plan: StepPlan | None = None
        self._groups.roster = None
        self._store, self._streams = StateStore(self._groups.sharding), SideStreams()
        # a caller that defers refreshes has this object
        self._pending: PendingRefreshes
        self.__dict__.setdefault("_pending", PendingRefreshes(self, self._counts)).forget()

    def _current_roster(self) -> Roster:
        return self._groups.current_roster(self.param_groups, self.state)

    def _finish_state(self) -> None:
        """Do pending refreshes, and wait until all offloaded state has been written back."""
        self._pending.finish()
        wait_for_host(self._streams)

    @torch.no_grad()
    def _convert_state(self) -> None:
        """Convert the state if a `state_dtype` has changed since the last step."""
        roster = self._current_roster()
        if not self._store.has_formats(roster, self.state):
            self._plan = None
            self._store.bring_up_to_date(roster, self.state)

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the initial state of every parameter that has none, for example before a
        checkpoint is loaded."""
        self._store.create(self._current_roster().params, self.state)

    def state_bytes_of_owners(
        self, *, offloaded: bool | None = None
    ) -> dict[tuple[int, ...], dict[int, int]]:
        """Return the bytes of optimizer state of all parameters that are spread over ranks, or of
        those with the option `offload` or without it: the ranks -> owner rank -> bytes (global
        ranks). Empty before the first step."""
        return self._groups.sharding.state_bytes(offloaded=offloaded)

    def state_pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        """Yield the state on this rank as pieces of whole entries, each with its parameter, for
        other checkpoint formats. Nothing is copied or sent between ranks."""
        self._finish_state()
        self._convert_state()
        yield from self._store.pieces(self._current_roster(), self.state)

    def formats(self) -> dict[Tensor, Formats]:
        """Return the formats in which the entries of each parameter's state are stored."""
        return {info.param: info.layout.formats for info in self._current_roster().params}

    def optional_entries(self) -> set[str]:
        """Return the names of the entries that a saved state may lack or have in addition."""
        rules = (settings.rule for settings in self._current_roster().groups)
        return {name for rule in rules for name in rule.optional_entries}

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
            self._groups.check_not_flat(self.param_groups)
        self._finish_state()
        if self._groups.sharding.has_shares:
            self._convert_state()
        on_this_rank = dict(self.state)
        try:
            if self._groups.sharding.has_shares:
                self.state.update(self._store.whole(self._current_roster().params, on_this_rank))
            saved = super().state_dict()
        finally:
            self.state.update(on_this_rank)
        groups = [saveable(group) for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

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
        self._finish_state()
        infos, saved = self._current_roster().params, dict[str, Any]()
        lender = Lender(self._store, infos, self.state) if self._store.is_lent else None

        def check(_: torch.optim.Optimizer, after_hooks: dict[str, Any]) -> dict[str, Any]:
            saved.update(checked(after_hooks, self.param_groups, self._groups))
            return without_values(saved)

        def load(_: torch.optim.Optimizer) -> None:
            self._load_exactly(saved, lender)

        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(load, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
        # accelerate replaces the parameters before the first step: let go of the old parameters
        if not self.state:
            self._groups.roster = None
            self._groups.sharding.forget()

    def _load_exactly(self, saved: dict[str, Any], lender: Lender | None) -> None:
        """Copy saved state into new buckets. The optimizer has the saved options, and no state."""
        others, states = dict(saved["state"]), dict[Tensor, dict[str, Any]]()
        for group, loaded in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if callable(value)})
            for p, key in zip(group["params"], loaded["params"], strict=True):
                if state := others.pop(key, {}):
                    states[p] = state
        sharding = self._groups.sharding
        sharding.forget_changed(self._groups.make_roster(self.param_groups, states).params)
        roster = self._groups.current_roster(self.param_groups, states)
        self._store.load(roster, self.state, states, lender)
        self.state.update(others)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_state()  # also before torch's load_state_dict replaces the state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. Views become separate tensors, for otherwise pickle would
        write the whole stack for each."""
        if any(self._groups.sharding.share_of(p) is not None for p in self.state):
            raise TypeError(
                "an optimizer of parameters that are spread over ranks cannot be pickled or "
                "copied, because process groups cannot; "
                "save its state_dict() with torch.distributed.checkpoint"
            )
        self._finish_state()
        state = super().__getstate__()
        separate = {
            p: {key: x.clone() if isinstance(x, Tensor) else x for key, x in entries.items()}
            if isinstance(p, Tensor)
            else entries
            for p, entries in state["state"].items()
        }
        parts = {"_counts": self._counts, "_groups": self._groups}
        return {**state, "state": defaultdict(dict, separate), **parts}
