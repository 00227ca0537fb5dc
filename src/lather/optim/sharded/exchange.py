"""Parts of tensors that travel between the ranks of a mesh, all at once: one all-to-all.

Tensors are numbered, alike on all ranks, and a `Route` names a part of one. What a rank sends to another it packs in order, and the other
finds it in the same order: nothing but the elements travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.sharded.owners import Share, Unit
from lather.optim.sharded.placement import Box, Index
from lather.torch_private import foreach_copy_

T = TypeVar("T")


class Route(NamedTuple):
    """A part of tensor number `item`."""

    item: int
    where: Index
    size: tuple[int, ...]


Parts = list[tuple[Route, Tensor]]
"""What has come, with where it belongs."""

Arriving = Callable[[], Parts]
"""What is on its way: called once, it returns all of it, for which the current stream waits."""


class Transfer:
    """Which parts of some parameters go where.

    Inward from what holders have of the matrices into what owners put together; of several copies one is sent, the owner's own if it has
    one. Outward from the owners into what everybody holds, every copy of it.
    """

    def __init__(self, shares: Sequence[Share], *, inward: bool) -> None:
        self._sends: list[list[Route]] = [[] for _ in shares[0].spread.ranks]
        """To each position."""
        self._receives: list[list[Route]] = [[] for _ in shares[0].spread.ranks]
        """From each position."""
        self._kept: list[tuple[Route, Route]] = []
        """From and to, on this rank."""
        units = chain.from_iterable(share.units for share in shares)
        self._is_needed = any(unit.owner not in unit.holders if inward else not unit.stays for unit in units)
        """Whether anything travels between any two ranks; if not, nobody calls."""
        for item, share in enumerate(shares):
            spread = share.spread
            for unit in share.units:
                for box in spread.positions_of if unit.owner == spread.position else (spread.box,):
                    self._add(item, share, unit, box, inward)

    def _add(self, item: int, share: Share, unit: Unit, box: Box, inward: bool) -> None:
        """What `box` has of the unit, where this rank is concerned; alike in order on all ranks."""
        overlap, me, positions = box.overlap(unit.box), share.spread.position, share.spread.positions_of[box]
        if overlap is None:
            return
        boxes = (box, share.origin(unit) if unit.owner == me else unit.box)
        start, to = (Route(item, overlap.within(outer), overlap.size) for outer in boxes)
        ways = [(unit.owner if unit.owner in positions else positions[unit.number % len(positions)], unit.owner)]
        if not inward:
            start, to, ways = to, start, [(unit.owner, position) for position in positions]
        for sender, receiver in ways:
            if sender == receiver == me:
                self._kept += [] if share.in_place else [(start, to)]
            elif sender == me:
                self._sends[receiver].append(start)
            elif receiver == me:
                self._receives[sender].append(to)

    def launch(self, sources: Callable[[int], Tensor], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Arriving:
        """Starts the exchange; every rank of the group calls it. `sources`: the tensors that are here, by number."""
        kept = [(to, sources(start.item)[start.where]) for start, to in self._kept]
        if not self._is_needed:
            return lambda: kept
        sends, receives = list(chain(*self._sends)), list(chain(*self._receives))
        packed, arriving = (torch.empty(_numel(routes), dtype=dtype, device=device) for routes in (sends, receives))
        if sends:
            foreach_copy_(_split(packed, sends), [sources(route.item)[route.where] for route in sends])
        sizes_in, sizes_out = (list(map(_numel, routes)) for routes in (self._receives, self._sends))
        work = dist.all_to_all_single(arriving, packed, sizes_in, sizes_out, group=group, async_op=True)

        def wait() -> Parts:
            nonlocal packed
            work.wait()
            del packed  # it had to be there until now
            return [*kept, *zip(receives, _split(arriving, receives), strict=True)]

        return wait

    def move(self, sources: Sequence[Tensor], targets: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """All of it at once, between tensors of one dtype and device."""
        put(self.launch(sources.__getitem__, sources[0].dtype, sources[0].device, group)(), targets.__getitem__)


def put(parts: Parts, targets: Callable[[int], Tensor]) -> None:
    """What has come into the tensors where it belongs, by number."""
    if parts:
        foreach_copy_([targets(route.item)[route.where] for route, _ in parts], [part for _, part in parts])


def in_batches(items: Iterable[tuple[T, Any, float]]) -> list[list[T]]:
    """(item, key, size): those of equal keys together, as many as have a size of 1 in all, or one that has more; in order."""
    found: dict[Any, list[list[T]]] = {}
    room: dict[Any, float] = {}
    for item, key, size in items:
        if room.get(key, -1.0) < size:
            found.setdefault(key, []).append([])
            room[key] = 1.0
        found[key][-1].append(item)
        room[key] -= size
    return list(chain(*found.values()))


def _numel(routes: Sequence[Route]) -> int:
    return sum(math.prod(route.size) for route in routes)


def _split(flat: Tensor, routes: Sequence[Route]) -> list[Tensor]:
    parts = flat.split([math.prod(route.size) for route in routes]) if routes else ()
    return [part.view(route.size) for part, route in zip(parts, routes, strict=True)]
