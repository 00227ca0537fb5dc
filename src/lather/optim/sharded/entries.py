"""Conversion of the state of parameters that are spread over ranks to DTensors for a state dict,
and back.

The owner rank of a matrix keeps its whole entries; in a DTensor every rank holds the rows that its
position in the mesh gives it. In both directions one all-to-all moves many entries at once. Entries
of elementwise parameters are sharded like the parameter.

A state dict has copies, which later steps do not change. Before the first step it is room for a
checkpoint, and a copy might not fit into memory: then rows that this rank keeps anyway are lent,
and a load into the same optimizer finds them in their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lather.boxes import Box, local
from lather.optim.batched.buckets import in_batches
from lather.optim.batched.roster import ParamInfo
from lather.optim.sharded.exchange import Transfer
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit, matrices_of
from lather.optim.sharded.placement import Spread, spread_of_dtensor
from lather.optim.sharded.sharding import Sharding
from lather.torch_private import dtensor_over

BATCH_BYTES = 2**24
"""Bytes of whole entries that one all-to-all moves: limits the memory of saving and loading."""

States = Sequence[tuple[ParamInfo, dict[str, Any]]]
"""Parameters with their state."""


@dataclass(frozen=True, eq=False)
class SpreadEntry:
    """One entry of the state of one parameter."""

    p: Tensor
    key: str
    value: Tensor
    """The part that this rank keeps, or when loading the saved entry, which is whole or a
    DTensor."""
    dtype: torch.dtype
    share: OwnedParameter
    """Owners of the parameter's units."""
    spread: Spread
    """Spread of the DTensor of the entry."""

    @property
    def is_cut_alike(self) -> bool:
        """Whether the DTensor holds on every rank exactly the part that the rank keeps."""
        return self.share.is_gathered or (self.share.elementwise and not self.share.travels)

    def own_rows(self) -> Tensor | None:
        """Return the rows that the DTensor holds on this rank as a view of what the rank keeps;
        None if it does not keep them all, one after the other."""
        if self.is_cut_alike:
            return self.value.view(self.spread.box.size)
        units = self.owned(self.spread).own
        first, rows = self.spread.box.offset[:1], self.spread.box.size[:1]
        if self.share.elementwise or not units or not any(rows):
            return None
        numbers = [unit.number for unit in units]
        if self.share.layout.per_expert:
            if not set(range(first[0], first[0] + rows[0])) <= set(numbers):
                return None
            first = (numbers.index(first[0]),)
        return self.value[first[0] : first[0] + rows[0]]

    def owned(self, spread: Spread) -> OwnedParameter:
        """Return the owners of the parts of an entry with this spread."""
        found: list[tuple[Box, int, int]]
        if self.share.is_gathered:
            found = [
                (box, 0, position) for position, box in enumerate(self.spread.boxes) if box.numel
            ]
        else:
            boxes = [] if self.share.elementwise else matrices_of(self.share.layout, spread.shape)
            found = [
                (boxes[unit.number] if boxes else unit.box, unit.number, unit.owner)
                for unit in self.share.units
            ]
        units = tuple(
            OwnedUnit(box, number, owner, spread.holders(box)) for box, number, owner in found
        )
        return OwnedParameter(spread, self.share.layout, units, is_apart=True)


def whole_entries(
    states: States, sharding: Sharding, *, lend: bool
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of parameters that are spread over ranks as DTensors, without `step`. All
    ranks of their meshes call this together.

    The DTensors are copies. With `lend`, rows that this rank keeps anyway are views of its state,
    which saves memory while a checkpoint is loaded into them."""
    found: dict[Tensor, dict[str, Tensor]] = {one.param: {} for one, _ in states}
    for some in _batches(states, sharding):
        rows = []
        for entry in some:
            own = entry.own_rows() if lend else None
            rows.append(entry.value.new_empty(entry.spread.box.size) if own is None else own)
        if some[0].is_cut_alike and not lend:
            for entry, copy in zip(some, rows, strict=True):
                copy.copy_(entry.value.view(copy.shape))
        elif not some[0].is_cut_alike:
            transfer = Transfer([entry.owned(entry.spread) for entry in some], inward=False)
            transfer.move([entry.value for entry in some], rows, sharding.group_of(some[0].spread))
        for entry, part in zip(some, rows, strict=True):
            mesh, placements = entry.spread.mesh, entry.spread.placements
            like = torch.empty(entry.spread.shape, device="meta")
            found[entry.p][entry.key] = dtensor_over(part, mesh, placements, like)
    return found


def load_entries(
    saved: States, state: Mapping[Tensor, Mapping[str, Tensor]], sharding: Sharding
) -> None:
    """Copy saved entries, which are whole or DTensors, into the parts that this rank keeps in
    `state`, without `step`. All ranks of the parameters' meshes call this together."""
    for some in _batches(saved, sharding):
        shares = [entry.owned(_spread_of_saved(entry)) for entry in some]
        sources = [local(entry.value).to(entry.p.device, entry.dtype) for entry in some]
        kept = [state[entry.p][entry.key] for entry in some]
        Transfer(shares, inward=True).move(sources, kept, sharding.group_of(some[0].spread))


def are_lent(
    saved: States, state: Mapping[Tensor, Mapping[str, Tensor]], sharding: Sharding
) -> bool:
    """Whether the saved entries are what `whole_entries` has lent of this state: each row that it
    could lend is where it was lent from."""
    for one, entries in saved:
        for some in _batches([(one, dict(state[one.param]))], sharding):
            for entry in some:
                own, part = entry.own_rows(), entries[entry.key]
                if own is None or not own.numel():
                    continue
                if not isinstance(part, DTensor) or not _is_same_place(own, local(part)):
                    return False
    return True


def _is_same_place(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (
        y.data_ptr(),
        y.shape,
        y.stride(),
        y.dtype,
    )


def _spread_of_saved(entry: SpreadEntry) -> Spread:
    own = entry.share.spread
    if not isinstance(entry.value, DTensor):
        return Spread(
            entry.spread.shape,
            own.ranks,
            (Box.whole(entry.spread.shape),) * len(own.ranks),
            own.position,
        )
    spread = spread_of_dtensor(entry.value, f"the saved {entry.key}")
    if spread.ranks != own.ranks:
        raise ValueError(
            f"the saved {entry.key} is on ranks {spread.ranks}, its parameter on {own.ranks}: load "
            "it onto the parameter's mesh"
        )
    return spread


def _batches(states: States, sharding: Sharding) -> list[list[SpreadEntry]]:
    """Divide the entries into batches, each for one all-to-all; they are the same on all ranks."""

    def entries() -> Iterator[tuple[SpreadEntry, Any, float]]:
        for one, state in states:
            share = sharding.share_of(one.param)
            assert share is not None
            for name, kept in one.layout.entries.items():
                shape = one.layout.shape_of(kept)
                spread = (
                    share.spread
                    if share.elementwise and not share.travels
                    else share.spread.rows(shape)
                )
                entry = SpreadEntry(one.param, name, state[name], kept.dtype, share, spread)
                yield (
                    entry,
                    (spread.ranks, kept.dtype, entry.is_cut_alike),
                    math.prod(shape) * kept.dtype.itemsize / BATCH_BYTES,
                )

    return in_batches(entries())
