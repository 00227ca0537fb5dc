"""Entries of state of parameters that are spread over ranks: as DTensors for a state dict, and from there to whoever owns the matrices.

An owner has whole matrices; a DTensor wants every rank to have the rows that its place in the mesh gives it. Both ways it is one all-to-all
for many entries at once. Entries of elementwise parameters are cut as the parameter is; they are copied, for what an optimizer keeps is a
view of a stack, and `torch.distributed.checkpoint.async_save` cannot stage a DTensor over a view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lather.optim.engine.roster import ParamInfo
from lather.optim.engine.state import kept_entries
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit, matrices_of
from lather.optim.sharded.placement import Box, Spread, local, spread_of_dtensor
from lather.optim.sharded.sharding import Sharding, Transfer, in_batches

AT_ONCE = 2**26
"""Bytes of whole entries that travel in one go: bounds the memory of saving and loading."""

States = Sequence[tuple[ParamInfo, dict[str, Any]]]
"""Parameters with their state."""


@dataclass(frozen=True, eq=False)
class SpreadEntry:
    """One entry of one parameter."""

    p: Tensor
    key: str
    value: Tensor
    """The part that this rank keeps; or the entry as it was saved, whole or a DTensor."""
    dtype: torch.dtype
    share: OwnedParameter
    """Share of the parameter."""
    spread: Spread
    """Spread of the entry, as its DTensor has it."""

    @property
    def is_cut_alike(self) -> bool:
        """Whether the DTensor has on every rank what that rank keeps."""
        return self.share.is_gathered or (self.share.elementwise and not self.share.travels)

    def owned(self, spread: Spread) -> OwnedParameter:
        """Who keeps what of an entry that is spread in this way."""
        found: list[tuple[Box, int, int]]
        if self.share.is_gathered:
            found = [(box, 0, position) for position, box in enumerate(self.spread.boxes) if box.numel]
        else:
            boxes = [] if self.share.elementwise else matrices_of(self.share.layout, spread.shape)
            found = [(boxes[unit.number] if boxes else unit.box, unit.number, unit.owner) for unit in self.share.units]
        units = tuple(OwnedUnit(box, number, owner, spread.holders(box)) for box, number, owner in found)
        return OwnedParameter(spread, self.share.layout, units, self.share.elementwise, is_apart=True)


def whole_entries(states: States, sharding: Sharding) -> dict[Tensor, dict[str, Tensor]]:
    """The state of spread parameters as DTensors, `step` aside. Every rank of their meshes calls it."""
    found: dict[Tensor, dict[str, Tensor]] = {one.param: {} for one, _ in states}
    for some in _batches(states, sharding):
        if some[0].is_cut_alike:
            rows = [entry.value.view(entry.spread.box.size).clone() for entry in some]
        else:
            rows = [entry.value.new_empty(entry.spread.box.size) for entry in some]
            transfer = Transfer([entry.owned(entry.spread) for entry in some], inward=False)
            transfer.move([entry.value for entry in some], rows, sharding.group_of(some[0].spread))
        for entry, own in zip(some, rows, strict=True):
            mesh, placements, like = entry.spread.mesh, entry.spread.placements, torch.empty(entry.spread.shape, device="meta")
            found[entry.p][entry.key] = DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    return found


def load_entries(states: States, sharding: Sharding) -> dict[Tensor, dict[str, Tensor]]:
    """This rank's part of saved entries, each whole or a DTensor, `step` aside. Every rank of the parameters' meshes calls it."""
    found: dict[Tensor, dict[str, Tensor]] = {one.param: {} for one, _ in states}
    for some in _batches(states, sharding):
        shares = [entry.owned(_spread_of_saved(entry)) for entry in some]
        sources = [local(entry.value).to(entry.p.device, entry.dtype) for entry in some]
        for entry, share in zip(some, shares, strict=True):
            size = entry.spread.box.size if entry.is_cut_alike else share.region.size if share.own else (0,)
            found[entry.p][entry.key] = torch.empty(size, dtype=entry.dtype, device=entry.p.device)
        kept = [found[entry.p][entry.key] for entry in some]
        Transfer(shares, inward=True).move(sources, kept, sharding.group_of(some[0].spread))
    return found


def _spread_of_saved(entry: SpreadEntry) -> Spread:
    own = entry.share.spread
    if not isinstance(entry.value, DTensor):
        return Spread(entry.spread.shape, own.ranks, (Box.whole(entry.spread.shape),) * len(own.ranks), own.position)
    spread = spread_of_dtensor(entry.value, f"the saved {entry.key}")
    if spread.ranks != own.ranks:
        raise ValueError(
            f"the saved {entry.key} is on ranks {spread.ranks}, its parameter on {own.ranks}: load it onto the parameter's mesh"
        )
    return spread


def _batches(states: States, sharding: Sharding) -> list[list[SpreadEntry]]:
    """Entries that travel in one go, alike on all ranks."""

    def entries() -> Iterator[tuple[SpreadEntry, Any, float]]:
        for one, state in states:
            share = sharding.share_of(one.param)
            assert share is not None
            for name, kept in kept_entries(one.layout).items():
                shape = kept.shape_in(one.layout)
                spread = share.spread if share.elementwise and not share.travels else share.spread.rows(shape)
                entry = SpreadEntry(one.param, name, state[name], kept.dtype, share, spread)
                yield entry, (spread.ranks, kept.dtype, entry.is_cut_alike), math.prod(shape) * kept.dtype.itemsize / AT_ONCE

    return in_batches(entries())
