"""Conversion of the state of parameters that are spread over ranks to DTensors for a state dict, and back.

The owner rank of a matrix keeps its whole entries; in a DTensor every rank holds the rows that its position in the mesh gives it. In both
directions one all-to-all moves many entries at once. Entries of elementwise parameters are sharded like the parameter. They are copied
nevertheless: the optimizer keeps views of stacks, and `torch.distributed.checkpoint.async_save` cannot stage a DTensor over a view.
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
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit, matrices_of
from lather.optim.sharded.placement import Box, Spread, local, spread_of_dtensor
from lather.optim.sharded.sharding import Sharding, Transfer, in_batches

BATCH_BYTES = 2**26
"""Bytes of whole entries that one all-to-all moves: limits the memory of saving and loading."""

States = Sequence[tuple[ParamInfo, dict[str, Any]]]
"""Parameters with their state."""


@dataclass(frozen=True, eq=False)
class SpreadEntry:
    """One entry of the state of one parameter."""

    p: Tensor
    key: str
    value: Tensor
    """The part that this rank keeps, or when loading the saved entry, which is whole or a DTensor."""
    dtype: torch.dtype
    share: OwnedParameter
    """Owners of the parameter's units."""
    spread: Spread
    """Spread of the DTensor of the entry."""

    @property
    def is_cut_alike(self) -> bool:
        """Whether the DTensor holds on every rank exactly the part that the rank keeps."""
        return self.share.is_gathered or (self.share.elementwise and not self.share.travels)

    def owned(self, spread: Spread) -> OwnedParameter:
        """Return the owners of the parts of an entry with this spread."""
        found: list[tuple[Box, int, int]]
        if self.share.is_gathered:
            found = [(box, 0, position) for position, box in enumerate(self.spread.boxes) if box.numel]
        else:
            boxes = [] if self.share.elementwise else matrices_of(self.share.layout, spread.shape)
            found = [(boxes[unit.number] if boxes else unit.box, unit.number, unit.owner) for unit in self.share.units]
        units = tuple(OwnedUnit(box, number, owner, spread.holders(box)) for box, number, owner in found)
        return OwnedParameter(spread, self.share.layout, units, is_apart=True)


def whole_entries(states: States, sharding: Sharding) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of parameters that are spread over ranks as DTensors, without `step`. All ranks of their meshes call this
    together."""
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
    """Return the parts that this rank keeps of saved entries, which are whole or DTensors, without `step`. All ranks of the parameters'
    meshes call this together."""
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
    """Divide the entries into batches, each for one all-to-all; they are the same on all ranks."""

    def entries() -> Iterator[tuple[SpreadEntry, Any, float]]:
        for one, state in states:
            share = sharding.share_of(one.param)
            assert share is not None
            for name, kept in one.layout.entries.items():
                shape = kept.shape_in(one.layout)
                spread = share.spread if share.elementwise and not share.travels else share.spread.rows(shape)
                entry = SpreadEntry(one.param, name, state[name], kept.dtype, share, spread)
                yield entry, (spread.ranks, kept.dtype, entry.is_cut_alike), math.prod(shape) * kept.dtype.itemsize / BATCH_BYTES

    return in_batches(entries())
