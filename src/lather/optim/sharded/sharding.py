"""Exchange between ranks over which parameters are spread: every rank updates the matrices that it
owns, and receives the other updates.

Gradients are sent from the ranks that hold them to the owners, and updates from the owners to the
ranks that hold the parameter, by one all-to-all each for a batch of similar parameters. Factors,
bases and moments stay with the owner. While owners compute one batch, the gradients of the next one
and the updates of the last one are sent. An owner computes exactly what a single process with the
whole parameter would, so results are the same on every mesh.

    Sharding        here: the spread of each parameter, and its owners
    OwnerExchange   in `lather.optim.sharded.exchange`: the exchange of one batch of parameters
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import gradient_dtype, is_dtensor, local
from lather.device import Read, read
from lather.optim.batched.buckets import BUCKET_BYTES, Member, in_batches
from lather.optim.batched.matrix_layout import Layout, RowLayout
from lather.optim.batched.roster import ParamInfo, comparable
from lather.optim.controls import CONTROLS
from lather.optim.sharded.exchange import OwnerExchange, member_of
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit, rows_of_copies, share_out
from lather.optim.sharded.placement import Spread, spread_of_dtensor, spread_of_shard
from lather.torch_private import new_group_of


class Sharding:
    """Spread and owners of the parameters of an optimizer."""

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        """`tp_group`: process group of tensor-parallel shards that are plain tensors; their
        parameter groups have a `partition_dim`."""
        self.tp_group = tp_group
        self._spreads: dict[Any, Spread] = {}
        """Spreads that were computed; parameters with equal shape and placements share one."""
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """Process group of the ranks of each mesh, by these ranks."""
        self._shares: dict[int, OwnedParameter] = {}

    def spread_of(
        self, p: Tensor, group: Mapping[str, Any], name: str = "parameter"
    ) -> Spread | None:
        """Return the spread of a parameter; None if it is not spread over ranks. Raises ValueError
        for unsupported placements."""
        shape, dim = tuple(p.shape), group.get("partition_dim")
        if is_dtensor(p):
            key: Any = (shape, p.device_mesh, tuple(p.placements))
        elif "partition_dim" in group:
            key = (shape, p.device.type, dim)
        else:
            return None
        if key not in self._spreads:
            self._spreads[key] = (
                spread_of_dtensor(p, name)
                if is_dtensor(p)
                else spread_of_shard(p, dim, self.tp_group, name)
            )
        return self._spreads[key]

    @property
    def has_shares(self) -> bool:
        """Whether any parameter is spread over ranks."""
        return bool(self._shares)

    def group_of(self, spread: Spread) -> dist.ProcessGroup:
        """Return the process group of a mesh's ranks, in the order of positions. The first call for
        a mesh of several axes creates one, which all its ranks must do together."""
        ranks, mesh = spread.ranks, spread.mesh
        if ranks not in self.groups:
            assert mesh is not None
            group = mesh.get_group() if mesh.ndim == 1 else None
            if group is None or tuple(dist.get_process_group_ranks(group)) != ranks:
                group = new_group_of(ranks)
            self.groups[ranks] = group
        return self.groups[ranks]

    def state_bytes(
        self, *, offloaded: bool | None = None
    ) -> dict[tuple[int, ...], dict[int, int]]:
        """Return the bytes of state of all parameters that are spread over ranks and have owners,
        or of those with the option `offload` or without it: the ranks -> owner -> bytes (global
        ranks)."""
        sizes: dict[tuple[int, ...], dict[int, int]] = {}
        for share in self._shares.values():
            if offloaded is not None and share.layout.rule.offload != offloaded:
                continue
            entries = share.layout.entries.values()
            of_matrix = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
            of_owners = sizes.setdefault(tuple(share.spread.ranks), {})
            for unit in share.units:
                size, rank = of_matrix, share.spread.ranks[unit.owner]
                if share.elementwise:
                    part = share.layout.of_part(unit.box.size)
                    size = sum(math.prod(part.shape_of(x)) * x.dtype.itemsize for x in entries)
                of_owners[rank] = of_owners.get(rank, 0) + size
        return sizes

    def share_of(self, p: Tensor) -> OwnedParameter | None:
        """Return how the work on a parameter is divided among ranks; None if it is not spread over
        ranks."""
        return self._shares.get(id(p))

    def member_of(self, info: ParamInfo) -> Member | None:
        """Return the member for this rank's work on a parameter, or None if it has none."""
        share = self.share_of(info.param)
        if share is None:
            return Member(info.param, info.layout, range(info.layout.batch))
        return member_of(info, share)

    def plan(self, params: Sequence[ParamInfo]) -> None:
        """Assign owners to parameters that have none yet. All ranks of their meshes call this
        together with the same parameters.

        Raises ValueError on all these ranks if the parameters differ, or if an option on which the
        state depends has changed."""
        new: dict[tuple[int, ...], list[tuple[ParamInfo, Spread]]] = {}
        for info in params:
            if info.spread is not None and id(info.param) not in self._shares:
                new.setdefault(info.spread.ranks, []).append((info, info.spread))
            elif info.spread is not None and not self._still_fits(info):
                raise ValueError(
                    "matrix_layout, max_precond_dim, precondition_1d, sides, ownership or a limit "
                    "on the update or a control of a sharded parameter "
                    f"of shape {info.spread.shape} was changed after its state was made: save its "
                    "state_dict(), make a new optimizer "
                    "with the new options, and load the entries that still fit"
                )
            elif info.spread is not None:
                self._change_formats(info, info.spread)
        for ranks in sorted(new, key=lambda ranks: (-len(ranks), ranks)):
            self._check_same(new[ranks])
            self._plan_mesh(ranks, new[ranks])

    def _change_formats(self, info: ParamInfo, spread: Spread) -> None:
        """Give a parameter that has owners its layout, in which the state may have other
        formats."""
        share, layout = self._shares[id(info.param)], info.layout
        if share.layout is layout:
            return
        units = share.units
        if share.elementwise and type(share.layout) is not type(layout):
            units = tuple(_units_of_elements(spread, layout))
        # layouts are equal though their rules differ, as in `weight_rounding`
        self._shares[id(info.param)] = replace(share, layout=layout, units=units)

    def forget_changed(self, params: Sequence[ParamInfo]) -> None:
        """Forget all owners if an option on which the state depends has changed. For loading, which
        replaces all state."""
        if not all(self._still_fits(info) for info in params):
            self.forget()

    def forget(self) -> None:
        """Forget all owners; `plan` assigns them again."""
        self._shares.clear()

    def _still_fits(self, info: ParamInfo) -> bool:
        share = self.share_of(info.param)
        return share is None or (
            _state_key(share.layout) == _state_key(info.layout)
            and share.is_replicated == info.is_replicated
        )

    def _check_same(self, params: Sequence[tuple[ParamInfo, Spread]]) -> None:
        ranks, described = list(params[0][1].ranks), []
        for info, spread in params:
            assert spread.mesh is not None
            rule, where = info.settings.rule, (tuple(spread.mesh.shape), spread.placements)
            options = (
                type(rule).__qualname__,
                rule.ownership,
                rule.matrix_layout,
                comparable(rule.state_dtype),
                *(getattr(rule, name) for name in sorted(CONTROLS)),
                rule.offload,
                rule.weight_rounding,
            )
            dtypes = info.param.dtype, gradient_dtype(info.param)
            described.append((info.layout, *map(str, (*dtypes, where, *options))))
        number = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7])
        digests = torch.tensor(
            [number, -number], dtype=torch.int64, device=local(params[0][0].param).device
        )
        dist.all_reduce(digests, dist.ReduceOp.MAX, group=self.group_of(params[0][1]))
        largest, smallest = read(digests, Read.SAME).tolist()
        if largest != -smallest:
            raise ValueError(
                f"the ranks {ranks} give the optimizer different parameters or options: give all "
                "of them the same parameters, "
                "in the same order, with the same options"
            )

    def _plan_mesh(
        self, ranks: tuple[int, ...], params: Sequence[tuple[ParamInfo, Spread]]
    ) -> None:
        loads = dict.fromkeys(ranks, 0.0)
        for share in self._shares.values():
            # otherwise some of these ranks do not know of it
            if set(ranks) <= set(share.spread.ranks) and not share.elementwise:
                cost = share.layout.rule.cost(share.layout.matrix)
                for unit in share.units:
                    loads[share.spread.ranks[unit.owner]] = (
                        loads.get(share.spread.ranks[unit.owner], 0.0) + cost
                    )
        owned = [
            (spread, info.layout)
            for info, spread in params
            if not info.layout.elementwise and not info.is_replicated
        ]
        shared = iter(share_out(owned, loads))
        for info, spread in params:
            units: Sequence[OwnedUnit] = ()
            if info.layout.elementwise:
                units = _units_of_elements(spread, info.layout)
            elif not info.is_replicated:
                units = next(shared)
            self._shares[id(info.param)] = OwnedParameter(
                spread, info.layout, tuple(units), is_replicated=info.is_replicated
            )

    def exchanges(
        self, params: Sequence[ParamInfo], members: Mapping[int, Member]
    ) -> list[OwnerExchange]:
        """Return the exchanges of a step that these parameters take, the same and in the same order
        on all ranks. Parameters of which no part is sent are in none. `members`: id of a parameter
        -> its member on this rank."""
        items = []
        for info in params:
            share, rule, dtype = self.share_of(info.param), info.rule, info.rule.compute_dtype
            if share is not None and share.travels:
                ranks, layout = share.spread.ranks, info.layout
                phases = info.needs_weights, info.has_statistics
                size = math.prod(layout.shape) / len(ranks) * dtype.itemsize
                key = (
                    ranks,
                    type(layout),
                    layout.inner,
                    info.param.dtype,
                    gradient_dtype(info.param),
                    layout.keeps_remainder,
                    dtype,
                    phases,
                    type(rule),
                    rule.offload,
                )
                items.append(((info, share), key, size / (rule.bucket_bytes or BUCKET_BYTES)))
        return [
            OwnerExchange(batch, self.group_of(batch[0][1].spread), members)
            for batch in in_batches(items)
        ]


def _units_of_elements(spread: Spread, layout: Layout) -> list[OwnedUnit]:
    return rows_of_copies(spread, whole_rows=isinstance(layout, RowLayout))


def _state_key(layout: Layout) -> tuple[object, ...]:
    """Return what the state of a layout depends on, but for the formats of its entries and for
    entries that come and go with an option."""
    optional = layout.rule.optional_entries
    entries = {name: x.entry for name, x in layout.formats.items() if name not in optional}
    return (layout.shape, True, tuple(entries)) if layout.elementwise else (layout, entries)
