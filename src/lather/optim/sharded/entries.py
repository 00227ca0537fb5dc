"""Conversion of the state of parameters that are spread over ranks to DTensors for a state dict,
and back.

The owner rank of a matrix keeps its whole entries; in a DTensor every rank holds the rows that its
position in the mesh gives it. In both directions one all-to-all moves many entries at once. Entries
of elementwise parameters are sharded like the parameter.

A state dict consists of copies, so later steps do not change it. Before the first step, however, a
state dict is made to load a checkpoint into, and copies might not fit into memory. Then the rows
that this rank keeps anyway are *lent*: they are views of the state, and loading the state dict into
the same optimizer finds them in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lather.boxes import Box, local
from lather.optim.batched.buckets import in_batches
from lather.optim.batched.remainders import REMAINDER
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
        is_alike = self.share.elementwise and not self.share.travels
        return self.share.is_replicated or is_alike or self.key == REMAINDER

    def lendable_rows(self) -> Tensor | None:
        """Return the rows that the DTensor holds on this rank as a view of what the rank keeps;
        None if it does not keep them all, one after the other."""
        if self.is_cut_alike:
            return self.value.view(self.spread.box.size)
        units = self.owners_over(self.spread).owned_units
        if self.share.elementwise or not units or not any(self.spread.box.size[:1]):
            return None
        first, num_rows = self.spread.box.offset[0], self.spread.box.size[0]
        if self.share.layout.batch_dim is not None:
            experts = [unit.number for unit in units]
            if not set(range(first, first + num_rows)) <= set(experts):
                return None
            first = experts.index(first)
        return self.value[first : first + num_rows]

    def owners_over(self, spread: Spread) -> OwnedParameter:
        """Return the owners of the parts of the entry, whose DTensor has this spread."""
        if self.share.is_replicated or self.key == REMAINDER:
            owners = [(box, 0, rank) for rank, box in enumerate(self.spread.boxes) if box.numel]
        elif self.share.elementwise:
            box_of = partial(self.share.layout.box_of, self.share.layout.entries[self.key])
            owners = [(box_of(unit.box), unit.number, unit.owner) for unit in self.share.units]
        else:
            boxes = matrices_of(self.share.layout, spread.shape)
            owners = [(boxes[unit.number], unit.number, unit.owner) for unit in self.share.units]
        units = tuple(
            OwnedUnit(box, number, owner, spread.holders(box)) for box, number, owner in owners
        )
        return OwnedParameter(spread, self.share.layout, units, is_separate=True)


def whole_entries(
    states: States, sharding: Sharding, *, lend: bool
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of parameters that are spread over ranks as DTensors, without `step`. All
    ranks of their meshes call this together.

    The DTensors are copies. With `lend`, rows that this rank keeps anyway are views of its state,
    which saves memory while a checkpoint is loaded into them."""
    entries: dict[Tensor, dict[str, Tensor]] = {info.param: {} for info, _ in states}
    for batch in _batches(states, sharding):
        parts = []
        for entry in batch:
            rows = entry.lendable_rows() if lend else None
            if rows is None:
                rows = entry.value.new_empty(entry.spread.box.size, dtype=entry.dtype)
            parts.append(rows)
        if not batch[0].is_cut_alike:
            transfer = Transfer([entry.owners_over(entry.spread) for entry in batch], inward=False)
            values = [entry.value.to(entry.p.device, entry.dtype) for entry in batch]
            transfer.move(values, parts, sharding.group_of(batch[0].spread))
        elif not lend:
            for entry, part in zip(batch, parts, strict=True):
                part.copy_(entry.value.view(part.shape))
        for entry, part in zip(batch, parts, strict=True):
            mesh, placements = entry.spread.mesh, entry.spread.placements
            like = torch.empty(entry.spread.shape, device="meta")
            entries[entry.p][entry.key] = dtensor_over(part, mesh, placements, like)
    return entries


def load_entries(
    saved: States, state: Mapping[Tensor, Mapping[str, Tensor]], sharding: Sharding
) -> None:
    """Copy saved entries, which are whole or DTensors, into the parts that this rank keeps in
    `state`, without `step`. All ranks of the parameters' meshes call this together."""
    for batch in _batches(saved, sharding):
        shares = [entry.owners_over(_spread_of_saved(entry)) for entry in batch]
        sources = [local(entry.value).to(entry.p.device, entry.dtype) for entry in batch]
        targets = [state[entry.p][entry.key] for entry in batch]
        Transfer(shares, inward=True).move(sources, targets, sharding.group_of(batch[0].spread))


def are_lent(
    saved: States, state: Mapping[Tensor, Mapping[str, Tensor]], sharding: Sharding
) -> bool:
    """Whether the saved entries are what `whole_entries` has lent of this state: each row that it
    could lend is where it was lent from."""
    for info, entries in saved:
        for batch in _batches([(info, dict(state[info.param]))], sharding):
            for entry in batch:
                rows, part = entry.lendable_rows(), entries[entry.key]
                if rows is None or not rows.numel():
                    continue
                if not isinstance(part, DTensor) or _place(rows) != _place(local(part)):
                    return False
    return True


def _place(x: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors with the same elements in the same memory."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _spread_of_saved(entry: SpreadEntry) -> Spread:
    ranks, shape = entry.share.spread.ranks, entry.spread.shape
    if not isinstance(entry.value, DTensor):
        boxes = (Box.whole(shape),) * len(ranks)
        return Spread(shape, ranks, boxes, entry.share.spread.position)
    spread = spread_of_dtensor(entry.value, f"the saved {entry.key}")
    if spread.ranks != ranks:
        raise ValueError(
            f"the saved {entry.key} is on ranks {spread.ranks}, its parameter on {ranks}: load "
            "it onto the parameter's mesh"
        )
    return spread


def _batches(states: States, sharding: Sharding) -> list[list[SpreadEntry]]:
    """Divide the entries into batches, each for one all-to-all; they are the same on all ranks."""

    def sized(entry: SpreadEntry) -> tuple[SpreadEntry, Any, float]:
        size = math.prod(entry.spread.shape) * entry.dtype.itemsize / BATCH_BYTES
        return entry, (entry.spread.ranks, entry.dtype, entry.is_cut_alike), size

    def entries() -> Iterator[tuple[SpreadEntry, Any, float]]:
        for info, state in states:
            share = sharding.share_of(info.param)
            assert share is not None
            for key, kind in info.layout.entries.items():
                shape = info.layout.shape_of(kind)
                is_cut_alike = share.elementwise and not share.travels
                spread = share.spread.alike(shape) if is_cut_alike else share.spread.rows(shape)
                yield sized(SpreadEntry(info.param, key, state[key], kind.dtype, share, spread))
            if info.layout.keeps_remainder and REMAINDER in state:
                spread = share.spread.alike((*share.spread.shape, 2))
                entry = state[REMAINDER]
                yield sized(SpreadEntry(info.param, REMAINDER, entry, entry.dtype, share, spread))

    return in_batches(entries())
