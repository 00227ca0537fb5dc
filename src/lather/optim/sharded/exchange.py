"""Parts of tensors that travel between the ranks of a mesh, all at once: one all-to-all.

Tensors are numbered, alike on all ranks, and a `Route` names a part of one. What a rank sends to another it packs in order, and the other
finds it in the same order: nothing but the elements travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.sharded.owners import Share, Unit
from lather.optim.sharded.placement import Box, Index
from lather.torch_private import foreach_copy_


class Route(NamedTuple):
    """A part of tensor number `item`."""

    item: int
    where: Index
    size: tuple[int, ...]


@dataclass
class Transfer:
    """Which parts go where."""

    num_peers: int
    sends: dict[int, list[Route]] = field(default_factory=dict)
    """By position, in ascending order; of the tensors that are here."""
    receives: dict[int, list[Route]] = field(default_factory=dict)
    """By position; into the tensors that are to be."""
    kept: list[tuple[Route, Route]] = field(default_factory=list)
    """From and to, on this rank."""
    is_needed: bool = False
    """Whether anything travels between any two ranks; if not, nobody calls."""

    def add(self, start: Route | None, to: Route | None, sender: int, receiver: int) -> None:
        """A part that goes from one position to another; `start` is given on the first, `to` on the second."""
        if start is not None and to is not None:
            self.kept.append((start, to))
        elif start is not None:
            self.sends.setdefault(receiver, []).append(start)
        elif to is not None:
            self.receives.setdefault(sender, []).append(to)

    def launch(self, sources: Callable[[int], Tensor], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Arriving:
        """Starts the exchange; every rank of the group calls it. `sources`: the tensors that are here, by number."""
        kept = [(to, sources(start.item)[start.where]) for start, to in self.kept]
        if not self.is_needed:
            return Arriving(kept, [], None)
        sizes_out, sizes_in = self._sizes(self.sends), self._sizes(self.receives)
        packed = torch.empty(sum(sizes_out), dtype=dtype, device=device)
        routes = [route for peer in sorted(self.sends) for route in self.sends[peer]]
        if routes:
            foreach_copy_(_split(packed, routes), [sources(route.item)[route.where] for route in routes])
        arriving = torch.empty(sum(sizes_in), dtype=dtype, device=device)
        work = dist.all_to_all_single(arriving, packed, sizes_in, sizes_out, group=group, async_op=True)
        to = [route for peer in sorted(self.receives) for route in self.receives[peer]]
        return Arriving(kept, list(zip(to, _split(arriving, to), strict=True)), work, packed)

    def _sizes(self, routes: dict[int, list[Route]]) -> list[int]:
        return [sum(math.prod(route.size) for route in routes.get(peer, ())) for peer in range(self.num_peers)]


def _split(flat: Tensor, routes: Sequence[Route]) -> list[Tensor]:
    parts = flat.split([math.prod(route.size) for route in routes]) if routes else ()
    return [part.view(route.size) for part, route in zip(parts, routes, strict=True)]


@dataclass
class Arriving:
    """What a launched `Transfer` brings."""

    _kept: list[tuple[Route, Tensor]]
    _received: list[tuple[Route, Tensor]]
    _work: dist.Work | None
    _packed: Tensor | None = None

    def wait(self) -> list[tuple[Route, Tensor]]:
        """Every part with where it belongs; the current stream waits for them."""
        if self._work is not None:
            self._work.wait()
        self._work = self._packed = None
        return [*self._kept, *self._received]


def to_owners(shares: Sequence[Share]) -> Transfer:
    """What holders have of the matrices, into what owners put together. Of several copies one is sent, the owner's own if it has one."""
    transfer = _empty(shares)
    for item, share in enumerate(shares):
        me = share.spread.position
        for unit, box, positions, overlap in _overlaps(share):
            sender = unit.owner if unit.owner in positions else positions[unit.number % len(positions)]
            start = Route(item, overlap.within(box), overlap.size) if sender == me else None
            to = Route(item, overlap.within(share.origin(unit)), overlap.size) if unit.owner == me else None
            transfer.add(start, to, sender, unit.owner)
        transfer.is_needed |= any(unit.owner not in unit.holders for unit in share.units)
    return transfer


def to_holders(shares: Sequence[Share]) -> Transfer:
    """What owners have of the matrices, into what everybody holds, every copy of it."""
    transfer = _empty(shares)
    for item, share in enumerate(shares):
        me = share.spread.position
        for unit, box, positions, overlap in _overlaps(share):
            for position in positions:
                if share.in_place and unit.owner == position == me:
                    continue
                start = Route(item, overlap.within(share.origin(unit)), overlap.size) if unit.owner == me else None
                to = Route(item, overlap.within(box), overlap.size) if position == me else None
                transfer.add(start, to, unit.owner, position)
        transfer.is_needed |= any(not unit.stays for unit in share.units)
    return transfer


def _empty(shares: Sequence[Share]) -> Transfer:
    return Transfer(len(shares[0].spread.ranks))


def _overlaps(share: Share) -> Iterator[tuple[Unit, Box, tuple[int, ...], Box]]:
    """(unit, a box, the positions that hold it, their overlap) wherever this rank is concerned, alike in order on all ranks."""
    own = share.spread.box
    for unit in share.units:
        mine = unit.owner == share.spread.position
        if mine and share.in_place and unit.stays:
            continue
        boxes = share.spread.positions_of.items() if mine else ((own, share.spread.positions_of[own]),)
        for box, positions in boxes:
            overlap = box.overlap(unit.box)
            if overlap is not None:
                yield unit, box, positions, overlap
