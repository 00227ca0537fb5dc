"""Entries of state of parameters that are spread over ranks: as DTensors for a state dict, and from there to whoever owns the matrices.

An owner has whole matrices; a DTensor wants every rank to have the rows that its place in the mesh gives it. Both ways it is one all-to-all
for many entries at once. Entries of elementwise parameters are cut as the parameter is, as torch's own optimizers have them: no copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lather.optim.engine.roster import ParamInfo
from lather.optim.engine.state import kept_entries
from lather.optim.sharded.exchange import Transfer, to_holders, to_owners
from lather.optim.sharded.owners import Share, Unit
from lather.optim.sharded.placement import Box, Spread, local, spread_of_dtensor, spread_on
from lather.optim.sharded.sharding import Sharding
from lather.torch_private import foreach_copy_

AT_ONCE = 2**26
"""Bytes of whole entries that travel in one go: bounds the memory of saving and loading."""

States = Sequence[tuple[ParamInfo, dict[str, Any]]]
"""Parameters with their state."""


@dataclass(frozen=True, eq=False)
class SpreadEntry:
    """One entry of one parameter."""

    p: Tensor
    key: str
    shape: tuple[int, ...]
    """Of the whole entry."""
    dtype: torch.dtype
    share: Share
    """The parameter's."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """Of the DTensor."""

    @property
    def is_cut_alike(self) -> bool:
        """Whether the DTensor has on every rank what that rank keeps."""
        return self.share.is_gathered or (self.share.elementwise and not self.share.travels)

    def as_dtensor(self, rows: Tensor) -> DTensor:
        stride = torch.empty(self.shape, device="meta").stride()
        shape = torch.Size(self.shape)
        return DTensor.from_local(rows, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def spread(self) -> Spread:
        """As the DTensor has it."""
        return spread_on(self.mesh, self.shape, self.placements)

    def owned(self, spread: Spread) -> Share:
        """Who keeps what of an entry that is spread in this way."""
        if self.share.is_gathered:
            rows = [Unit(box, 0, position, spread.holders(box)) for position, box in enumerate(self.spread().boxes) if box.numel]
            return Share(spread, self.share.layout, tuple(rows), elementwise=True, is_apart=True)
        units = []
        for unit in self.share.units:
            box = Box.whole(self.shape)
            if self.share.elementwise:
                box = unit.box
            elif self.share.layout.kind == "per_expert":
                box = Box((unit.number, *(0,) * (len(self.shape) - 1)), (1, *self.shape[1:]))
            units.append(Unit(box, unit.number, unit.owner, spread.holders(box)))
        return Share(spread, self.share.layout, tuple(units), self.share.elementwise, is_apart=True)

    def kept_size(self) -> tuple[int, ...]:
        """Of what this rank keeps."""
        if self.share.is_gathered:
            return self.spread().box.size
        own = self.share.own
        if not own:
            return (0,)
        if self.share.elementwise:
            return self.share.region.size
        return (len(own), *self.shape[1:]) if self.share.layout.kind == "per_expert" else self.shape


def whole_entries(states: States, sharding: Sharding) -> dict[Tensor, dict[str, Tensor]]:
    """The state of spread parameters as DTensors, `step` aside. Every rank of their meshes calls it."""
    found: dict[Tensor, dict[str, Tensor]] = {one.param: {} for one, _ in states}
    for some, kept in _batches(states, sharding):
        if some[0].is_cut_alike:
            rows = [
                x.view(entry.spread().box.size) if x.numel() else x.new_empty(entry.spread().box.size)
                for entry, x in zip(some, kept, strict=True)
            ]
        else:
            spreads = [entry.spread() for entry in some]
            rows = [x.new_empty(spread.box.size) for spread, x in zip(spreads, kept, strict=True)]
            transfer = to_holders([entry.owned(spread) for entry, spread in zip(some, spreads, strict=True)])
            _move(transfer, kept, rows, sharding.group_of(some[0].share.spread.ranks))
        for entry, own in zip(some, rows, strict=True):
            found[entry.p][entry.key] = entry.as_dtensor(own)
    return found


def load_entries(states: States, sharding: Sharding) -> dict[Tensor, dict[str, Tensor]]:
    """What this rank keeps of saved entries, each whole or a DTensor, `step` aside. Every rank of the parameters' meshes calls it."""
    found: dict[Tensor, dict[str, Tensor]] = {one.param: {} for one, _ in states}
    for some, saved in _batches(states, sharding):
        device = some[0].p.device
        kept = [torch.empty(entry.kept_size(), dtype=entry.dtype, device=device) for entry in some]
        spreads = [_spread_of_saved(entry, value) for entry, value in zip(some, saved, strict=True)]
        transfer = to_owners([entry.owned(spread) for entry, spread in zip(some, spreads, strict=True)])
        sources = [local(value).to(device, entry.dtype) for entry, value in zip(some, saved, strict=True)]
        _move(transfer, sources, kept, sharding.group_of(some[0].share.spread.ranks))
        for entry, own in zip(some, kept, strict=True):
            found[entry.p][entry.key] = own
    return found


def _move(transfer: Transfer, sources: Sequence[Tensor], targets: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    parts = transfer.launch(sources.__getitem__, sources[0].dtype, sources[0].device, group).wait()
    if parts:
        foreach_copy_([targets[route.item][route.where] for route, _ in parts], [part for _, part in parts])


def _spread_of_saved(entry: SpreadEntry, value: Tensor) -> Spread:
    own = entry.share.spread
    if not isinstance(value, DTensor):
        return Spread(entry.shape, own.ranks, (Box.whole(entry.shape),) * len(own.ranks), own.position)
    spread = spread_of_dtensor(value, f"the saved {entry.key}")
    if spread.ranks != own.ranks:
        raise ValueError(
            f"the saved {entry.key} is on ranks {spread.ranks}, its parameter on {own.ranks}: load it onto the parameter's mesh"
        )
    return spread


def _batches(states: States, sharding: Sharding) -> Iterator[tuple[list[SpreadEntry], list[Tensor]]]:
    """Entries that travel in one go, with their values, alike on all ranks."""
    alike: dict[Any, list[tuple[list[SpreadEntry], list[Tensor]]]] = {}
    room: dict[Any, int] = {}
    for one, state in states:
        share = sharding.share_of(one.param)
        assert share is not None
        for name, kept in kept_entries(one.layout).items():
            shape = kept.shape_in(one.layout)
            is_cut_alike = share.elementwise and not share.travels
            mesh, placements = sharding.mesh_of(one) if is_cut_alike else sharding.rows_of(one, shape)
            entry = SpreadEntry(one.param, name, shape, kept.dtype, share, mesh, placements)
            key = (share.spread.ranks, kept.dtype, entry.is_cut_alike)
            size = math.prod(entry.shape) * kept.dtype.itemsize
            if key not in alike or room[key] < size:
                alike.setdefault(key, []).append(([], []))
                room[key] = AT_ONCE
            room[key] -= size
            alike[key][-1][0].append(entry)
            alike[key][-1][1].append(state[name])
    for batches in alike.values():
        yield from batches
