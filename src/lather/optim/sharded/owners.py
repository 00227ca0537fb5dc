"""Assignment of matrices to owner ranks: every matrix has one owner, and all owners have about the
same work.

Source: Graham's longest-processing-time-first list scheduling (1969), with one change: a matrix
that is whole on some rank is assigned to that rank, unless its work would then exceed the mean,
because it need not be sent. No rank exceeds the mean by more than the cost of one matrix. The
assignment depends on shapes, options and placements alone, so every rank computes the same one.

A parameter is divided into units, of which each has one owner:

    matrices     if the rule works on whole matrices: one, or one per expert
    rows         if the rule is elementwise: a rank owns what only it holds, and ranks that hold
                 copies divide them among themselves
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from lather.boxes import Box
from lather.optim.batched.matrix_layout import Layout
from lather.optim.sharded.placement import Spread


@dataclass(frozen=True)
class OwnedUnit:
    """A part of a parameter that one rank updates: a matrix, or some rows of a parameter with an
    elementwise rule."""

    box: Box
    """Box of the unit in the whole parameter."""
    number: int
    """Number of the matrix in the parameter; 0 for rows."""
    owner: int
    """Position of the owner rank in the parameter's mesh."""
    holders: tuple[int, ...]
    """Positions of the ranks that hold the whole unit."""

    @property
    def stays(self) -> bool:
        """Whether only the owner holds the unit, so that it is never sent."""
        return self.holders == (self.owner,)


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter that is spread over ranks, with the owners of its units."""

    spread: Spread
    layout: Layout
    """Layout of the whole parameter."""
    units: tuple[OwnedUnit, ...]
    """Units of the parameter, in ascending order of their numbers."""
    is_separate: bool = False
    """Whether owners keep their units in separate tensors, never in the parameter itself."""
    is_replicated: bool = False
    """Whether the parameter has no owners, because every rank gathers and updates it
    (`lather.optim.sharded.replicated`)."""

    @property
    def elementwise(self) -> bool:
        """Whether the units are rows, which their owners update in place; a rank owns at most one.
        Otherwise units are matrices."""
        return self.layout.elementwise

    @cached_property
    def owned_units(self) -> tuple[OwnedUnit, ...]:
        """Units that this rank owns."""
        return tuple(unit for unit in self.units if unit.owner == self.spread.position)

    @cached_property
    def travels(self) -> bool:
        """Whether any rank sends a part of the parameter in a step."""
        return not all(unit.stays for unit in self.units)

    @cached_property
    def in_place(self) -> bool:
        """Whether this rank holds all units that it owns as one box, and so updates them in
        place."""
        units = self.owned_units
        are_neighbors = not units or units[-1].number - units[0].number == len(units) - 1
        return not self.is_separate and (
            self.elementwise or (are_neighbors and all(unit.stays for unit in units))
        )

    @property
    def region(self) -> Box:
        """Box of the units that this rank owns, in the whole parameter. For matrices that are not
        adjacent, its size alone is meaningful."""
        first, num_units = self.owned_units[0].box, len(self.owned_units)
        return first if num_units == 1 else Box(first.offset, self.layout.shape_with(num_units))

    def origin(self, unit: OwnedUnit) -> Box:
        """Return the box in which `unit` has the same index (`Box.within`) as in this rank's tensor
        of owned units. Only for its owner."""
        if self.in_place:
            return self.spread.box
        slot = bisect_left(self.owned_units, unit.number, key=lambda owned: owned.number)
        if not slot:
            return unit.box
        # entries of the state, which are separate, have the matrices along their dim 0
        dim = 0 if self.is_separate else self.layout.batch_dim or 0
        offset = list(unit.box.offset)
        offset[dim] -= slot * unit.box.size[dim]
        return Box(tuple(offset), unit.box.size)


def matrices_of(layout: Layout, shape: tuple[int, ...] | None = None) -> list[Box]:
    """Return the box of each matrix of a parameter, in order. With `shape`: the boxes in an entry
    of the state that has this shape, where they follow each other along dim 0."""
    whole = Box.whole(layout.shape if shape is None else shape)
    if layout.batch_dim is None:
        return [whole]
    dim = layout.batch_dim if shape is None else 0
    return [whole.cut(dim, layout.batch, number) for number in range(layout.batch)]


def rows_of_copies(spread: Spread, *, whole_rows: bool = False) -> list[OwnedUnit]:
    """Divide a parameter with an elementwise rule into units: the ranks that hold copies of a box
    share it, along its first dim of more than one element, so that parts are contiguous; with
    `whole_rows` not along the last dim."""
    units = []
    for box, positions in spread.positions_of.items():
        sizes = box.size[:-1] if whole_rows else box.size
        dim = next((d for d, n in enumerate(sizes) if n > 1), None)
        parts = (
            [box]
            if dim is None
            else [box.cut(dim, len(positions), number) for number in range(len(positions))]
        )
        units += [
            OwnedUnit(part, 0, owner, positions)
            for part, owner in zip(parts, positions, strict=False)
            if part.numel
        ]
    return units


def share_out(
    params: Sequence[tuple[Spread, Layout]], loads: Mapping[int, float]
) -> list[list[OwnedUnit]]:
    """Assign the matrices of all parameters of one mesh to owners, and return the units of each
    parameter.

    Args:
        params: spread and layout of each parameter.
        loads: global rank -> cost of the work that is assigned to it already.
    """
    holders = cache(Spread.holders)  # many parameters have the same spread
    items = [
        (layout.rule.cost(layout.matrix), parameter, number, box, holders(spread, box))
        for parameter, (spread, layout) in enumerate(params)
        for number, box in enumerate(matrices_of(layout))
    ]
    items.sort(key=lambda item: -item[0])  # the sort is stable
    ranks = params[0][0].ranks if params else ()
    owners = assign(
        [cost for cost, *_ in items],
        [held for *_, held in items],
        [loads.get(rank, 0.0) for rank in ranks],
    )
    units: list[list[OwnedUnit]] = [[] for _ in params]
    for (_, parameter, number, box, held), owner in zip(items, owners, strict=True):
        units[parameter].append(OwnedUnit(box, number, owner, held))
    return units


def assign(
    costs: Sequence[float], holders: Sequence[Sequence[int]], loads: Sequence[float]
) -> list[int]:
    """Return the owner's position for each item. `costs` must descend; `holders`: positions that
    hold the item; `loads`: cost of the work that each position has already."""
    load = list(loads)
    mean = (sum(load) + sum(costs)) / max(1, len(load))
    idlest = [(amount, position) for position, amount in enumerate(load)]
    heapq.heapify(idlest)
    owners = []
    for cost, positions in zip(costs, holders, strict=True):
        owner = min(positions, key=lambda position: (load[position], position), default=None)
        if owner is None or load[owner] + cost > mean * (1 + 1e-9):
            while idlest[0][0] != load[idlest[0][1]]:  # outdated: it was given work since
                heapq.heappop(idlest)
            owner = idlest[0][1]
        load[owner] += cost
        heapq.heappush(idlest, (load[owner], owner))
        owners.append(owner)
    return owners
