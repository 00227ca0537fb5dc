"""Parameters that are spread over ranks, and a step in which every rank works on the matrices that it owns, whole, once and for all.

Gradients go from their holders to the owners, updates from the owners to the holders, in one all-to-all each for every bucket of alike
parameters. Factors, bases and moments stay with the owner. While one bucket is computed the next one's gradients and the last one's
updates are on their way. The owner does what a process with the whole parameter would do, so the numbers are the same on every mesh.

    Sharding   the plan: where each parameter is, and who owns what of it
    OwnerExchange   one bucket's way to the owners and back
    Transfer   parts of tensors that travel between the ranks of a mesh, all at once
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.engine.buckets import BUCKET_BYTES
from lather.optim.engine.matrix_layout import Layout
from lather.optim.engine.members import Member
from lather.optim.engine.plan import apply_
from lather.optim.engine.roster import ParamInfo, comparable
from lather.optim.engine.state import compute_dtype, kept_entries
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit, rows_of_copies, share_out
from lather.optim.sharded.placement import Box, Index, Spread, is_dtensor, local, local_grad, spread_of_dtensor, spread_of_shard
from lather.torch_private import foreach_copy_, new_group_of

T = TypeVar("T")


class Sharding:
    """Where an optimizer's parameters are, and who owns what of them."""

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        """`tp_group`: of plain tensor-parallel shards, which have a `partition_dim` in their parameter group."""
        self.tp_group = tp_group
        self._spreads: dict[Any, Spread] = {}
        """Spreads, one for all parameters that are spread alike."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._shares: dict[int, OwnedParameter] = {}

    def spread_of(self, p: Tensor, group: Mapping[str, Any], name: str = "parameter") -> Spread | None:
        """The spread of a parameter; None for one that this process has to itself. Raises ValueError for one that cannot be served."""
        shape, dim = tuple(p.shape), group.get("partition_dim")
        if is_dtensor(p):
            key: Any = (shape, p.device_mesh, tuple(p.placements))
        elif "partition_dim" in group:
            key = (shape, p.device.type, dim)
        else:
            return None
        if key not in self._spreads:
            self._spreads[key] = spread_of_dtensor(p, name) if is_dtensor(p) else spread_of_shard(p, dim, self.tp_group, name)
        return self._spreads[key]

    @property
    def has_shares(self) -> bool:
        """Whether any parameter is spread."""
        return bool(self._shares)

    def group_of(self, spread: Spread) -> dist.ProcessGroup:
        """The process group of a mesh's ranks, by position. The first call for a mesh of several axes makes one: all its ranks call."""
        ranks, mesh = spread.ranks, spread.mesh
        if ranks not in self._groups:
            assert mesh is not None
            group = mesh.get_group() if mesh.ndim == 1 else None
            if group is None or tuple(dist.get_process_group_ranks(group)) != ranks:
                group = new_group_of(ranks)
            self._groups[ranks] = group
        return self._groups[ranks]

    def state_bytes(self) -> dict[tuple[int, ...], dict[int, int]]:
        """Bytes of state of all spread parameters but those that all ranks work on alike: by the ranks that they are spread over, and by
        owner among these (global ranks)."""
        found: dict[tuple[int, ...], dict[int, int]] = {}
        for share in self._shares.values():
            entries = kept_entries(share.layout).values()
            of_element = sum(entry.dtype.itemsize for entry in entries)
            of_matrix = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
            of_owners = found.setdefault(tuple(share.spread.ranks), {})
            for unit in share.units:
                rank = share.spread.ranks[unit.owner]
                of_owners[rank] = of_owners.get(rank, 0) + (unit.box.numel * of_element if share.elementwise else of_matrix)
        return found

    def share_of(self, p: Tensor) -> OwnedParameter | None:
        """Who owns what of a parameter that was planned; None for one that is not spread."""
        return self._shares.get(id(p))

    def plan(self, params: Sequence[ParamInfo]) -> None:
        """Owners for those that have none yet; those of others stay. Every rank of their meshes calls it with the same parameters.

        Raises ValueError, on all of these, if the parameters are not the same, or if options on which what is kept depends have changed.
        """
        new: dict[tuple[int, ...], list[tuple[ParamInfo, Spread]]] = {}
        for one in params:
            if one.spread is not None and id(one.param) not in self._shares:
                new.setdefault(one.spread.ranks, []).append((one, one.spread))
            elif one.spread is not None and not self._still_fits(one):
                raise ValueError(
                    "matrix_layout, max_precond_dim, precondition_1d, sides, ownership or a limit on the update of a sharded parameter "
                    f"of shape {one.spread.shape} was changed after its state was made: save its state_dict(), make the optimizer anew "
                    "with the new options, and load what still fits"
                )
        for ranks in sorted(new, key=lambda ranks: (-len(ranks), ranks)):
            self._check_same(new[ranks])
            self._plan_mesh(ranks, new[ranks])

    def forget_changed(self, params: Sequence[ParamInfo]) -> None:
        """All shares, if options on which one depends have changed: `plan` makes them anew. For loading, which replaces all state."""
        if not all(self._still_fits(one) for one in params):
            self.forget()

    def forget(self) -> None:
        """All shares; `plan` makes them anew."""
        self._shares.clear()

    def _still_fits(self, one: ParamInfo) -> bool:
        share = self.share_of(one.param)
        return share is None or (_kept(share.layout) == _kept(one.layout) and share.is_gathered == _is_gathered(one))

    def _check_same(self, params: Sequence[tuple[ParamInfo, Spread]]) -> None:
        ranks, said = list(params[0][1].ranks), []
        for one, spread in params:
            assert spread.mesh is not None
            rule, where = one.settings.rule, (tuple(spread.mesh.mesh.shape), spread.placements)
            options = (type(rule).__qualname__, rule.ownership, rule.matrix_layout, comparable(rule.state_dtype), rule.keep_norm)
            said.append((one.layout, *map(str, (one.param.dtype, where, *options))))
        number = int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7])
        own = torch.tensor([number, -number], dtype=torch.int64, device=local(params[0][0].param).device)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group_of(params[0][1]))
        largest, smallest = own.tolist()
        if largest != -smallest:
            raise ValueError(
                f"the ranks {ranks} give the optimizer different parameters or options: give all of them the same parameters, "
                "in the same order, with the same options"
            )

    def _plan_mesh(self, ranks: tuple[int, ...], params: Sequence[tuple[ParamInfo, Spread]]) -> None:
        loads = dict.fromkeys(ranks, 0.0)
        for share in self._shares.values():
            if set(ranks) <= set(share.spread.ranks) and not share.elementwise:  # only then do all ranks here know of it
                cost = share.layout.rule.cost(share.layout.matrix)
                for unit in share.units:
                    loads[share.spread.ranks[unit.owner]] = loads.get(share.spread.ranks[unit.owner], 0.0) + cost
        owned = [(spread, one.layout) for one, spread in params if one.layout.kind != "elements" and not _is_gathered(one)]
        shared = iter(share_out(owned, loads))
        for one, spread in params:
            elementwise = one.layout.kind == "elements"
            own = tuple(rows_of_copies(spread) if elementwise else () if _is_gathered(one) else next(shared))
            self._shares[id(one.param)] = OwnedParameter(spread, one.layout, own, elementwise, is_gathered=_is_gathered(one))

    def exchanges(self, params: Sequence[ParamInfo]) -> list[OwnerExchange]:
        """The exchanges of a step that these take, alike and in one order on all ranks; parameters of which nothing travels have none."""
        wanted = []
        for one in params:
            share, rule, dtype = self.share_of(one.param), one.rule, compute_dtype(one.rule)
            if share is not None and share.travels:
                ranks, layout = share.spread.ranks, share.layout
                key = (
                    ranks,
                    layout.kind,
                    layout.inner,
                    one.param.dtype,
                    dtype,
                    share.elementwise,
                    one.needs_weights,
                    one.has_statistics,
                    type(rule),
                )
                size = math.prod(layout.shape) / len(ranks) * dtype.itemsize
                wanted.append(((one, share), key, size / (rule.bucket_bytes or BUCKET_BYTES)))
        return [OwnerExchange(some, self.group_of(some[0][1].spread)) for some in in_batches(wanted)]


def _kept(layout: Layout) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """The layout, with names and shapes of what is kept under it."""
    return layout, {name: entry.shape for name, entry in kept_entries(layout).items()}


def _is_gathered(one: ParamInfo) -> bool:
    """Whether all ranks work on the parameter alike."""
    return one.spread is not None and one.layout.kind != "elements" and one.rule.ownership == "replicated"


class OwnerExchange:
    """Alike parameters of one mesh whose matrices are owned by other ranks than those that hold them.

    launch_in, finish_in, then the owners compute, launch_out, finish_out. Of elementwise ones only weights travel, to the other copies.
    """

    def __init__(self, params: Sequence[tuple[ParamInfo, OwnedParameter]], group: dist.ProcessGroup) -> None:
        """`params`: each with who owns what of it."""
        self.params, shares, self.group = [one for one, _ in params], [share for _, share in params], group
        first = self.params[0]
        self.dtype, self.elementwise, self.device = first.param.dtype, shares[0].elementwise, local(first.param).device
        self.has_statistics, self.needs_weights = first.has_statistics, first.needs_weights
        if not self.elementwise:
            self.inward = Transfer(shares, inward=True)
        self.outward = Transfer(shares, inward=False)
        self._arriving: list[Arriving] = []
        self._leaving: list[Arriving] = []
        self._is_in = False

    def launch_in(self) -> None:
        """Gradients set out. Nothing happens if they have."""
        if self._is_in or self.elementwise:
            return
        self._is_in = True
        grads = [local_grad(one.param) for one in self.params]
        sources = [grads] + ([[local(one.param) for one in self.params]] if self.needs_weights else [])
        self._arriving = [self.inward.launch(some.__getitem__, self.dtype, self.device, self.group) for some in sources]

    def finish_in(self, members: Mapping[int, Member]) -> None:
        """Owners put together what has arrived, and make room for updates. `members`: by id of the parameter."""
        own = self._owned(members)
        for name, arriving in zip(("received", "received_weight"), self._arriving, strict=False):
            whole = {item: torch.empty(member.layout.shape, dtype=self.dtype, device=self.device) for item, member in own.items()}
            put(arriving(), whole.__getitem__)
            for item, member in own.items():
                setattr(member, name, whole[item])
        self._arriving = []
        for member in own.values():
            if member.update is None:
                member.update = torch.empty(member.layout.shape, dtype=compute_dtype(member.layout.rule), device=self.device)

    def launch_out(self, members: Mapping[int, Member]) -> None:
        """Updates set out; the gradients are gone."""
        own = self._owned(members)

        def source(item: int) -> Tensor:
            update = None if self.elementwise else own[item].update
            return local(self.params[item].param) if update is None else update

        dtype = self.dtype if self.elementwise else compute_dtype(self.params[0].rule)
        leaving = self.outward.launch(source, dtype, self.device, self.group)
        self.forget(members)
        self._leaving = [leaving]

    def finish_out(self) -> None:
        """Every rank changes what it holds."""
        by_rates: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
        for route, update in self._leaving.pop()():
            one = self.params[route.item]
            weights, updates = by_rates.setdefault(one.rates(), ([], []))
            weights.append(local(one.param)[route.where])
            updates.append(update)
        for (lr, decay), (weights, updates) in by_rates.items():
            if self.elementwise:
                foreach_copy_(weights, updates)
            else:
                apply_(weights, updates, lr, decay)

    def forget(self, members: Mapping[int, Member]) -> None:
        """Nothing of this step is kept: the updates are on their way, or there was an error."""
        for member in self._owned(members).values():
            member.received = member.received_weight = member.update = None
        self._arriving, self._leaving, self._is_in = [], [], False

    def _owned(self, members: Mapping[int, Member]) -> dict[int, Member]:
        """The members that were put together here, by number."""
        found = ((item, members.get(id(one.param))) for item, one in enumerate(self.params))
        return {item: member for item, member in found if member is not None and member.index is None}


class TensorRegion(NamedTuple):
    """A part of tensor number `item`; tensors are numbered alike on all ranks."""

    item: int
    where: Index
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


Parts = list[tuple[TensorRegion, Tensor]]
"""Tensors that have come, each with the place where it belongs."""

Arriving = Callable[[], Parts]
"""Tensors on their way: called once, it returns all of them, for which the current stream waits."""


class Transfer:
    """Which parts of some parameters go where.

    Inward from what holders have of the matrices into what owners put together; of several copies one is sent, the owner's own if it has
    one. Outward from the owners into what everybody holds, every copy of it. What a rank sends to another it packs in order, and the other
    finds it in the same order: nothing but the elements travels.
    """

    def __init__(self, shares: Sequence[OwnedParameter], *, inward: bool) -> None:
        self._sends: list[list[TensorRegion]] = [[] for _ in shares[0].spread.ranks]
        """Routes of what is sent, by receiving position."""
        self._receives: list[list[TensorRegion]] = [[] for _ in shares[0].spread.ranks]
        """Routes of what is received, by sending position."""
        self._kept: list[tuple[TensorRegion, TensorRegion]] = []
        """Routes from and to, of what stays on this rank."""
        units = chain.from_iterable(share.units for share in shares)
        self._is_needed = any(unit.owner not in unit.holders if inward else not unit.stays for unit in units)
        """Whether anything travels between any two ranks; if not, nobody calls."""
        for item, share in enumerate(shares):
            spread = share.spread
            for unit in share.units:
                for box in spread.positions_of if unit.owner == spread.position else (spread.box,):
                    self._add(item, share, unit, box, inward)

    def _add(self, item: int, share: OwnedParameter, unit: OwnedUnit, box: Box, inward: bool) -> None:
        """Add the routes of what `box` has of the unit, where this rank is concerned; in the same order on all ranks."""
        overlap, me, positions = box.overlap(unit.box), share.spread.position, share.spread.positions_of[box]
        if overlap is None:
            return
        boxes = (box, share.origin(unit) if unit.owner == me else unit.box)
        start, to = (TensorRegion(item, overlap.within(outer), overlap.size) for outer in boxes)
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
        sizes_out, sizes_in = ([sum(route.numel for route in some) for some in routes] for routes in (self._sends, self._receives))
        packed, arriving = (torch.empty(sum(sizes), dtype=dtype, device=device) for sizes in (sizes_out, sizes_in))
        if sends:
            foreach_copy_(_split(packed, sends), [sources(route.item)[route.where] for route in sends])
        work = dist.all_to_all_single(arriving, packed, sizes_in, sizes_out, group=group, async_op=True)

        def wait() -> Parts:
            nonlocal packed
            work.wait()
            del packed  # it had to be there until now
            return [*kept, *zip(receives, _split(arriving, receives), strict=True)]

        return wait

    def move(self, sources: Sequence[Tensor], targets: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Move everything at once, between tensors of one dtype and device."""
        put(self.launch(sources.__getitem__, sources[0].dtype, sources[0].device, group)(), targets.__getitem__)


def put(parts: Parts, targets: Callable[[int], Tensor]) -> None:
    """Copy what has come to where it belongs in the tensors, which are found by number."""
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


def _split(flat: Tensor, routes: Sequence[TensorRegion]) -> list[Tensor]:
    parts = flat.split([route.numel for route in routes]) if routes else ()
    return [part.view(route.size) for part, route in zip(parts, routes, strict=True)]
