"""Which rank works on which matrix: every matrix has one owner, no owner has much more to do than another, and all ranks know it.

Source of the rule: Graham's longest-processing-time-first list scheduling (1969), but that a matrix which is whole on some rank stays there
as long as that rank is not above the mean: what stays need not travel. No rank is above the mean by more than the cost of one matrix. The
plan is a function of shapes, options and placements, the same on every rank.

    matrices     of a parameter whose rule looks at whole matrices: one, or one per expert
    rows         of a parameter whose update is elementwise: what a rank holds alone is its own; copies are cut among their holders
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lather.optim.engine.layout import Layout
from lather.optim.sharded.placement import Box, Spread, chunk


@dataclass(frozen=True)
class Unit:
    """What one rank works on as a whole: a matrix, or some rows of a parameter whose elements are independent."""

    box: Box
    """In the whole parameter."""
    number: int
    """Of the matrix in the parameter; 0 if there is one."""
    owner: int
    """A position in the parameter's mesh."""
    holders: tuple[int, ...]
    """The positions that hold all of it."""

    @property
    def stays(self) -> bool:
        """Whether nothing of it ever travels."""
        return self.holders == (self.owner,)


@dataclass(frozen=True, eq=False)
class Share:
    """A parameter that is spread, and who works on what of it."""

    spread: Spread
    layout: Layout
    """Of the whole parameter."""
    units: tuple[Unit, ...]
    elementwise: bool
    """The units are rows, and their owners change them where they are; otherwise matrices, which may travel."""
    is_apart: bool = False
    """Owners have what is theirs in tensors of their own, never where the parameter is."""
    is_gathered: bool = False
    """Nobody owns a matrix: all ranks gather it and work on it alike (`lather.optim.sharded.gathered`)."""

    @cached_property
    def own(self) -> tuple[Unit, ...]:
        """Those that this rank owns."""
        return tuple(unit for unit in self.units if unit.owner == self.spread.position)

    @cached_property
    def travels(self) -> bool:
        """Whether anything of it does, on any rank."""
        return not all(unit.stays for unit in self.units)

    @cached_property
    def in_place(self) -> bool:
        """Whether all that is owned here is here, and in one piece: then it is worked on where it is."""
        numbers = [unit.number for unit in self.own]
        neighbours = not numbers or numbers == list(range(numbers[0], numbers[-1] + 1))
        return not self.is_apart and (self.elementwise or (neighbours and all(unit.stays for unit in self.own)))

    @cached_property
    def region(self) -> Box:
        """What is owned here, as a box of the whole parameter; of experts their number, when they are not neighbours."""
        if not self.own:
            return Box(self.spread.box.offset, (0,) * len(self.layout.shape))
        first = self.own[0].box
        return first if len(self.own) == 1 else Box(first.offset, (len(self.own), *first.size[1:]))

    def origin(self, unit: Unit) -> Box:
        """The box that the owner's tensor is taken to hold when `unit` is looked for in it."""
        if self.in_place:
            return self.spread.box
        if self.elementwise or self.layout.kind != "per_expert":
            return unit.box
        slot = self._slots[unit.number]
        return Box((unit.number - slot, *unit.box.offset[1:]), (len(self.own), *unit.box.size[1:]))

    @cached_property
    def _slots(self) -> dict[int, int]:
        return {unit.number: slot for slot, unit in enumerate(self.own)}


def matrices_of(layout: Layout) -> list[Box]:
    """The box of each matrix of a parameter, in order."""
    if layout.kind != "per_expert":
        return [Box.whole(layout.shape)]
    inner = layout.shape[1:]
    return [Box((number, *(0 for _ in inner)), (1, *inner)) for number in range(layout.batch)]


def rows_of_copies(spread: Spread) -> list[Unit]:
    """Elementwise work: every box is cut among the positions that hold it, along its first dim that can be: parts are contiguous."""
    units = []
    for box, positions in spread.positions_of.items():
        dim = next((d for d, n in enumerate(box.size) if n > 1), None)
        for number, owner in enumerate(positions):
            if dim is None:
                part = box if number == 0 else None
            else:
                start, length = chunk(box.size[dim], len(positions), number)
                offset, size = list(box.offset), list(box.size)
                offset[dim], size[dim] = offset[dim] + start, length
                part = Box(tuple(offset), tuple(size))
            if part is not None and part.numel:
                units.append(Unit(part, 0, owner, positions))
    return units


def share_out(wanted: Sequence[tuple[Spread, Layout]], loads: Mapping[int, float]) -> list[list[Unit]]:
    """The matrices of each parameter with their owners. The parameters are on one mesh.

    Args:
        wanted: of each parameter, where it is and its layout.
        loads: what ranks have to do already, by global rank.
    """
    found: list[tuple[float, int, int, Box, tuple[int, ...]]] = []
    holders_known: dict[tuple[int, Layout], list[tuple[int, ...]]] = {}
    for parameter, (spread, layout) in enumerate(wanted):
        boxes, key = matrices_of(layout), (id(spread), layout)
        if key not in holders_known:
            holders_known[key] = [spread.holders(box) for box in boxes]
        cost = layout.rule.cost(layout.matrix)
        for number, (box, holders) in enumerate(zip(boxes, holders_known[key], strict=True)):
            found.append((cost, parameter, number, box, holders))
    order = sorted(range(len(found)), key=lambda i: (-found[i][0], *found[i][1:3]))
    ranks = wanted[0][0].ranks if wanted else ()
    owners = assign([found[i][0] for i in order], [found[i][4] for i in order], [loads.get(rank, 0.0) for rank in ranks])
    units: list[list[Unit]] = [[] for _ in wanted]
    for (_, parameter, number, box, holders), owner in sorted(zip((found[i] for i in order), owners, strict=True), key=lambda x: x[0][1:3]):
        units[parameter].append(Unit(box, number, owner, holders))
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
