"""Which rank works on which matrix: every matrix has one owner, no owner has much more to do than another, and all ranks know it.

Source of the rule: Graham's longest-processing-time-first list scheduling (1969), but that a matrix which is whole on some rank stays there
as long as that rank is not above the mean: what stays need not travel. No rank is above the mean by more than the cost of one matrix. The
plan is a function of shapes, options and placements, the same on every rank.

    matrices     of a parameter whose rule looks at whole matrices: one, or one per expert
    rows         of a parameter whose update is elementwise: what a rank holds alone is its own; copies are cut among their holders
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from lather.optim.engine.matrix_layout import Layout
from lather.optim.sharded.placement import Box, Spread


@dataclass(frozen=True)
class OwnedUnit:
    """A piece that one rank works on as a whole: a matrix, or some rows of a parameter whose elements are independent."""

    box: Box
    """Box in the whole parameter."""
    number: int
    """Number of the matrix in the parameter; 0 if there is only one."""
    owner: int
    """Position of the owner in the parameter's mesh."""
    holders: tuple[int, ...]
    """The positions that hold all of it."""

    @property
    def stays(self) -> bool:
        """Whether nothing of it ever travels."""
        return self.holders == (self.owner,)


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter that is spread, and who works on what of it."""

    spread: Spread
    layout: Layout
    """Layout of the whole parameter."""
    units: tuple[OwnedUnit, ...]
    """Units of the parameter, ascending by number."""
    elementwise: bool
    """The units are rows, at most one on a rank, and their owners change them where they are; otherwise matrices, which may travel."""
    is_apart: bool = False
    """Owners have what is theirs in tensors of their own, never where the parameter is."""
    is_gathered: bool = False
    """Nobody owns a matrix: all ranks gather it and work on it alike (`lather.optim.sharded.gathered`)."""

    @cached_property
    def own(self) -> tuple[OwnedUnit, ...]:
        """The units that this rank owns."""
        return tuple(unit for unit in self.units if unit.owner == self.spread.position)

    @cached_property
    def travels(self) -> bool:
        """Whether anything of it travels, on any rank."""
        return not all(unit.stays for unit in self.units)

    @cached_property
    def in_place(self) -> bool:
        """Whether all that is owned here is here, and in one piece: then it is worked on where it is."""
        are_neighbours = not self.own or self.own[-1].number - self.own[0].number == len(self.own) - 1
        return not self.is_apart and (self.elementwise or (are_neighbours and all(unit.stays for unit in self.own)))

    @property
    def region(self) -> Box:
        """The part that is owned here, if any, as a box of the whole parameter; for experts that are not neighbours, a box of as many."""
        first = self.own[0].box
        return first if len(self.own) == 1 else Box(first.offset, (len(self.own), *first.size[1:]))

    def origin(self, unit: OwnedUnit) -> Box:
        """A box that begins where the owner's tensor is taken to begin when `unit` is looked for in it. Only its owner may ask."""
        if self.in_place:
            return self.spread.box
        slot = bisect_left(self.own, unit.number, key=lambda own: own.number)
        return Box((unit.box.offset[0] - slot, *unit.box.offset[1:]), unit.box.size) if slot else unit.box


def matrices_of(layout: Layout, shape: tuple[int, ...] | None = None) -> list[Box]:
    """The box of each matrix of a parameter, in order; in an entry of its state, which has this shape, that of what is the matrix's."""
    whole = Box.whole(layout.shape if shape is None else shape)
    return [whole.cut(0, layout.batch, number) for number in range(layout.batch)] if layout.kind == "per_expert" else [whole]


def rows_of_copies(spread: Spread) -> list[OwnedUnit]:
    """Elementwise work: every box is cut among the positions that hold it, along its first dim that can be: parts are contiguous."""
    units = []
    for box, positions in spread.positions_of.items():
        dim = next((d for d, n in enumerate(box.size) if n > 1), None)
        parts = [box] if dim is None else [box.cut(dim, len(positions), number) for number in range(len(positions))]
        units += [OwnedUnit(part, 0, owner, positions) for part, owner in zip(parts, positions, strict=False) if part.numel]
    return units


def share_out(wanted: Sequence[tuple[Spread, Layout]], loads: Mapping[int, float]) -> list[list[OwnedUnit]]:
    """The matrices of each parameter with their owners. The parameters are on one mesh.

    Args:
        wanted: of each parameter, where it is and its layout.
        loads: what ranks have to do already, by global rank.
    """
    holders = cache(Spread.holders)  # many parameters are spread alike
    found = [
        (layout.rule.cost(layout.matrix), parameter, number, box, holders(spread, box))
        for parameter, (spread, layout) in enumerate(wanted)
        for number, box in enumerate(matrices_of(layout))
    ]
    found.sort(key=lambda one: -one[0])  # the sort is stable
    ranks = wanted[0][0].ranks if wanted else ()
    owners = assign([cost for cost, *_ in found], [held for *_, held in found], [loads.get(rank, 0.0) for rank in ranks])
    units: list[list[OwnedUnit]] = [[] for _ in wanted]
    for (_, parameter, number, box, held), owner in zip(found, owners, strict=True):
        units[parameter].append(OwnedUnit(box, number, owner, held))
    return units


def assign(costs: Sequence[float], holders: Sequence[Sequence[int]], loads: Sequence[float]) -> list[int]:
    """An owner for each item; costs descend. `holders` have the item already, `loads` are what each position has to do before."""
    load = list(loads)
    mean = (sum(load) + sum(costs)) / max(1, len(load))
    idlest = [(amount, position) for position, amount in enumerate(load)]
    heapq.heapify(idlest)
    owners = []
    for cost, own in zip(costs, holders, strict=True):
        owner = min(own, key=lambda position: (load[position], position), default=None)
        if owner is None or load[owner] + cost > mean * (1 + 1e-9):
            while idlest[0][0] != load[idlest[0][1]]:  # it has been given work since
                heapq.heappop(idlest)
            owner = idlest[0][1]
        load[owner] += cost
        heapq.heappush(idlest, (load[owner], owner))
        owners.append(owner)
    return owners
