"""Exchange between ranks over which parameters are spread: every rank updates the matrices that it
owns, and receives the other updates.

Gradients are sent from the ranks that hold them to the owners, and updates from the owners to the
ranks that hold the parameter, by one all-to-all each for a batch of similar parameters. Factors,
bases and moments stay with the owner. While owners compute one batch, the gradients of the next one
and the updates of the last one are sent. An owner computes exactly what a single process with the
whole parameter would, so results are the same on every mesh.

    Sharding        the spread of each parameter, and its owners
    OwnerExchange   the exchange of one batch of parameters: gradients to the owners, updates back
    Transfer        one all-to-all of parts of tensors between the ranks of a mesh
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lather.device import Read, read
from lather.optim.engine.buckets import BUCKET_BYTES, GatheredMember, Member, in_batches
from lather.optim.engine.matrix_layout import Layout
from lather.optim.engine.roster import REPLACEMENT, Change, ParamInfo, comparable
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit, rows_of_copies, share_out
from lather.optim.sharded.placement import (
    Box,
    Index,
    Spread,
    is_dtensor,
    local,
    local_grad,
    spread_of_dtensor,
    spread_of_shard,
)
from lather.torch_private import foreach_copy_, new_group_of


class Sharding:
    """Spread and owners of the parameters of an optimizer."""

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        """`tp_group`: process group of tensor-parallel shards that are plain tensors; their
        parameter groups have a `partition_dim`."""
        self.tp_group = tp_group
        self._spreads: dict[Any, Spread] = {}
        """Spreads that were computed; parameters with equal shape and placements share one."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._shares: dict[int, OwnedParameter] = {}

    def spread_of(
        self, p: Tensor, group: Mapping[str, Any], name: str = "parameter"
    ) -> Spread | None:
        """Return the spread of a parameter; None if it is not spread over ranks. Raises ValueError
        for unsupported placements."""
        shape, dim = tuple(p.shape), group.get("partition_dim")
        if is_dtensor(p):
            key: Any = (shape, p.device_mesh, tuple(p.placements))
        elif "partition_dim" in group:
            key = (shape, p.device.type, dim)
        else:
            return None
        if key not in self._spreads:
            self._spreads[key] = (
                spread_of_dtensor(p, name)
                if is_dtensor(p)
                else spread_of_shard(p, dim, self.tp_group, name)
            )
        return self._spreads[key]

    @property
    def has_shares(self) -> bool:
        """Whether any parameter is spread over ranks."""
        return bool(self._shares)

    def group_of(self, spread: Spread) -> dist.ProcessGroup:
        """Return the process group of a mesh's ranks, in the order of positions. The first call for
        a mesh of several axes creates one, which all its ranks must do together."""
        ranks, mesh = spread.ranks, spread.mesh
        if ranks not in self._groups:
            assert mesh is not None
            group = mesh.get_group() if mesh.ndim == 1 else None
            if group is None or tuple(dist.get_process_group_ranks(group)) != ranks:
                group = new_group_of(ranks)
            self._groups[ranks] = group
        return self._groups[ranks]

    def state_bytes(self) -> dict[tuple[int, ...], dict[int, int]]:
        """Return the bytes of state of all parameters that are spread over ranks and have owners:
        the ranks -> owner -> bytes (global ranks)."""
        found: dict[tuple[int, ...], dict[int, int]] = {}
        for share in self._shares.values():
            entries = share.layout.entries.values()
            of_element = sum(entry.dtype.itemsize for entry in entries)
            of_matrix = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
            of_owners = found.setdefault(tuple(share.spread.ranks), {})
            for unit in share.units:
                rank = share.spread.ranks[unit.owner]
                of_owners[rank] = of_owners.get(rank, 0) + (
                    unit.box.numel * of_element if share.elementwise else of_matrix
                )
        return found

    def share_of(self, p: Tensor) -> OwnedParameter | None:
        """Return the owners of a parameter that was planned; None if it is not spread over
        ranks."""
        return self._shares.get(id(p))

    def plan(self, params: Sequence[ParamInfo]) -> None:
        """Assign owners to parameters that have none yet. All ranks of their meshes call this
        together with the same parameters.

        Raises ValueError on all these ranks if the parameters differ, or if an option on which the
        state depends has changed."""
        new: dict[tuple[int, ...], list[tuple[ParamInfo, Spread]]] = {}
        for one in params:
            if one.spread is not None and id(one.param) not in self._shares:
                new.setdefault(one.spread.ranks, []).append((one, one.spread))
            elif one.spread is not None and not self._still_fits(one):
                raise ValueError(
                    "matrix_layout, max_precond_dim, precondition_1d, sides, ownership or a limit "
                    "on the update of a sharded parameter "
                    f"of shape {one.spread.shape} was changed after its state was made: save its "
                    "state_dict(), make a new optimizer "
                    "with the new options, and load the entries that still fit"
                )
        for ranks in sorted(new, key=lambda ranks: (-len(ranks), ranks)):
            self._check_same(new[ranks])
            self._plan_mesh(ranks, new[ranks])

    def forget_changed(self, params: Sequence[ParamInfo]) -> None:
        """Forget all owners if an option on which the state depends has changed. For loading, which
        replaces all state."""
        if not all(self._still_fits(one) for one in params):
            self.forget()

    def forget(self) -> None:
        """Forget all owners; `plan` assigns them again."""
        self._shares.clear()

    def _still_fits(self, one: ParamInfo) -> bool:
        share = self.share_of(one.param)
        return share is None or (
            _kept(share.layout) == _kept(one.layout) and share.is_gathered == one.is_gathered
        )

    def _check_same(self, params: Sequence[tuple[ParamInfo, Spread]]) -> None:
        ranks, said = list(params[0][1].ranks), []
        for one, spread in params:
            assert spread.mesh is not None
            rule, where = one.settings.rule, (tuple(spread.mesh.shape), spread.placements)
            options = (
                type(rule).__qualname__,
                rule.ownership,
                rule.matrix_layout,
                comparable(rule.state_dtype),
                rule.keep_norm,
            )
            said.append((one.layout, *map(str, (one.param.dtype, where, *options))))
        number = int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7])
        own = torch.tensor(
            [number, -number], dtype=torch.int64, device=local(params[0][0].param).device
        )
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group_of(params[0][1]))
        largest, smallest = read(own, Read.SAME).tolist()
        if largest != -smallest:
            raise ValueError(
                f"the ranks {ranks} give the optimizer different parameters or options: give all "
                "of them the same parameters, "
                "in the same order, with the same options"
            )

    def _plan_mesh(
        self, ranks: tuple[int, ...], params: Sequence[tuple[ParamInfo, Spread]]
    ) -> None:
        loads = dict.fromkeys(ranks, 0.0)
        for share in self._shares.values():
            if (
                set(ranks) <= set(share.spread.ranks) and not share.elementwise
            ):  # otherwise some of these ranks do not know of it
                cost = share.layout.rule.cost(share.layout.matrix)
                for unit in share.units:
                    loads[share.spread.ranks[unit.owner]] = (
                        loads.get(share.spread.ranks[unit.owner], 0.0) + cost
                    )
        owned = [
            (spread, one.layout)
            for one, spread in params
            if not one.layout.elementwise and not one.is_gathered
        ]
        shared = iter(share_out(owned, loads))
        for one, spread in params:
            own = tuple(
                rows_of_copies(spread)
                if one.layout.elementwise
                else ()
                if one.is_gathered
                else next(shared)
            )
            self._shares[id(one.param)] = OwnedParameter(
                spread, one.layout, own, is_gathered=one.is_gathered
            )

    def exchanges(
        self, params: Sequence[ParamInfo], members: Mapping[int, Member]
    ) -> list[OwnerExchange]:
        """Return the exchanges of a step that these parameters take, the same and in the same order
        on all ranks. Parameters of which no part is sent are in none. `members`: id of a parameter
        -> its member on this rank."""
        wanted = []
        for one in params:
            share, rule, dtype = self.share_of(one.param), one.rule, one.rule.compute_dtype
            if share is not None and share.travels:
                ranks, layout, phases = (
                    share.spread.ranks,
                    share.layout,
                    (one.needs_weights, one.has_statistics),
                )
                size = math.prod(layout.shape) / len(ranks) * dtype.itemsize
                key = (
                    ranks,
                    type(layout),
                    layout.inner,
                    one.param.dtype,
                    dtype,
                    phases,
                    type(rule),
                )
                wanted.append(((one, share), key, size / (rule.bucket_bytes or BUCKET_BYTES)))
        return [
            OwnerExchange(some, self.group_of(some[0][1].spread), members)
            for some in in_batches(wanted)
        ]


def _kept(layout: Layout) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """Return the layout, with names and shapes of the entries of its state."""
    return layout, {name: entry.shape for name, entry in layout.entries.items()}


class OwnerExchange:
    """The exchange of one batch of similar parameters on one mesh, whose matrices are owned by
    other ranks than those that hold them.

    Call launch_in and finish_in, then let the owners compute, then call launch_out and finish_out.
    For elementwise rules only new weights are sent, to the ranks that hold copies.
    """

    def __init__(
        self,
        params: Sequence[tuple[ParamInfo, OwnedParameter]],
        group: dist.ProcessGroup,
        members: Mapping[int, Member],
    ) -> None:
        """`params`: parameters with their owners; `members`: id of a parameter -> its member on
        this rank."""
        self.params, shares, self.group = (
            [one for one, _ in params],
            [share for _, share in params],
            group,
        )
        first = self.params[0]
        self.dtype, self.elementwise, self.device = (
            first.param.dtype,
            shares[0].elementwise,
            local(first.param).device,
        )
        self.update_dtype = self.dtype if self.elementwise else first.rule.compute_dtype
        self.has_statistics, self.needs_weights = first.has_statistics, first.needs_weights
        if not self.elementwise:
            self.inward = Transfer(shares, inward=True)
        self.outward = Transfer(shares, inward=False)
        found = ((item, members.get(id(one.param))) for item, one in enumerate(self.params))
        self._own = {item: member for item, member in found if isinstance(member, GatheredMember)}
        """Number of a parameter -> its member, if this rank owns matrices of it and gathers
        them."""
        self._arriving: dict[str, Arriving] | None = None
        """Field of the members -> the transfer of its values; empty when they are there, None
        before they are sent."""
        self._leaving: list[Arriving] = []
        self._versions: list[int] = []
        """Versions of the settings of the parameters from which `_changes` were read."""
        self._changes: list[Change] = []

    def launch_in(self) -> None:
        """Start to send gradients, and weights if the rule needs them, unless that has been done
        already."""
        if self._arriving is not None or self.elementwise:
            return
        sources = {"received": [local_grad(one.param) for one in self.params]}
        if self.needs_weights:
            sources["received_weight"] = [local(one.param) for one in self.params]
        self._arriving = {
            name: self.inward.launch(some.__getitem__, self.dtype, self.device, self.group)
            for name, some in sources.items()
        }

    def finish_in(self) -> None:
        """Assemble the received gradients and weights of the matrices that this rank owns, and
        allocate their updates."""
        for name, arriving in (self._arriving or {}).items():
            whole = {
                item: torch.empty(member.layout.shape, dtype=self.dtype, device=self.device)
                for item, member in self._own.items()
            }
            put(arriving(), whole.__getitem__)
            for item, member in self._own.items():
                setattr(member, name, whole[item])
        self._arriving = {}
        for member in self._own.values():
            if member.update is None:
                member.update = torch.empty(
                    member.layout.shape, dtype=self.update_dtype, device=self.device
                )

    def launch_out(self) -> None:
        """Start to send updates, and free the gradients."""

        def source(item: int) -> Tensor:
            update = None if self.elementwise else self._own[item].update
            return local(self.params[item].param) if update is None else update

        leaving = self.outward.launch(source, self.update_dtype, self.device, self.group)
        self.forget()
        self._leaving = [leaving]

    def finish_out(self) -> dict[Change, tuple[list[Tensor], list[Tensor]]]:
        """Receive the updates, and return for each change this rank's parts of the parameters and
        their updates."""
        versions = [one.settings.version for one in self.params]
        if versions != self._versions:
            self._versions, self._changes = versions, [one.change() for one in self.params]
        changes: dict[Change, tuple[list[Tensor], list[Tensor]]] = {}
        for route, update in self._leaving.pop()():
            change = REPLACEMENT if self.elementwise else self._changes[route.item]
            weights, updates = changes.setdefault(change, ([], []))
            weights.append(local(self.params[route.item].param)[route.where])
            updates.append(update)
        return changes

    def forget(self) -> None:
        """Free the tensors of this step, when the updates are being sent or after an error."""
        for member in self._own.values():
            member.received = member.received_weight = member.update = None
        self._arriving, self._leaving = None, []


class TensorRegion(NamedTuple):
    """A part of tensor number `item`; all ranks number the tensors in the same way."""

    item: int
    where: Index
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


Parts = list[tuple[TensorRegion, Tensor]]
"""Received tensors, each with the region that it is for."""

Arriving = Callable[[], Parts]
"""Function to be called once, which makes the current stream wait for the transfer and returns what
was received."""


class Transfer:
    """The routes of an all-to-all: which parts of which tensors are sent from which rank to which.

    Inward: from the ranks that hold parts of a matrix to its owner; if there are several copies of
    a part, one is sent, or none if the owner holds one. Outward: from the owner to every rank that
    holds a part or a copy of one. Sender and receiver know the order of the parts, so only their
    elements are sent.
    """

    def __init__(self, shares: Sequence[OwnedParameter], *, inward: bool) -> None:
        self._sends: list[list[TensorRegion]] = [[] for _ in shares[0].spread.ranks]
        """Regions to send, by the receiver's position."""
        self._receives: list[list[TensorRegion]] = [[] for _ in shares[0].spread.ranks]
        """Regions to receive, by the sender's position."""
        self._kept: list[tuple[TensorRegion, TensorRegion]] = []
        """Source and target regions of parts that are copied within this rank."""
        units = chain.from_iterable(share.units for share in shares)
        self._is_needed = any(
            unit.owner not in unit.holders if inward else not unit.stays for unit in units
        )
        """Whether any rank sends anything to another; if not, no rank calls all-to-all."""
        for item, share in enumerate(shares):
            spread = share.spread
            for unit in share.units:
                for box in spread.positions_of if unit.owner == spread.position else (spread.box,):
                    self._add(item, share, unit, box, inward)

    def _add(
        self, item: int, share: OwnedParameter, unit: OwnedUnit, box: Box, inward: bool
    ) -> None:
        """Add the routes for the part of the unit in `box` that this rank sends or receives, in the
        same order on all ranks."""
        overlap, me, positions = (
            box.overlap(unit.box),
            share.spread.position,
            share.spread.positions_of[box],
        )
        if overlap is None:
            return
        boxes = (box, share.origin(unit) if unit.owner == me else unit.box)
        start, to = (TensorRegion(item, overlap.within(outer), overlap.size) for outer in boxes)
        pairs = [
            (
                unit.owner if unit.owner in positions else positions[unit.number % len(positions)],
                unit.owner,
            )
        ]
        if not inward:
            start, to, pairs = to, start, [(unit.owner, position) for position in positions]
        for sender, receiver in pairs:
            if sender == receiver == me:
                self._kept += [] if share.in_place else [(start, to)]
            elif sender == me:
                self._sends[receiver].append(start)
            elif receiver == me:
                self._receives[sender].append(to)

    def launch(
        self,
        sources: Callable[[int], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> Arriving:
        """Start the all-to-all; all ranks of the group call this together. `sources`: function from
        the number of a tensor to this rank's tensor."""
        kept = [(to, sources(start.item)[start.where]) for start, to in self._kept]
        if not self._is_needed:
            return lambda: kept
        sends, receives = list(chain(*self._sends)), list(chain(*self._receives))
        sizes_out, sizes_in = (
            [sum(route.numel for route in some) for some in routes]
            for routes in (self._sends, self._receives)
        )
        packed, arriving = (
            torch.empty(sum(sizes), dtype=dtype, device=device) for sizes in (sizes_out, sizes_in)
        )
        if sends:
            foreach_copy_(
                _split(packed, sends), [sources(route.item)[route.where] for route in sends]
            )
        work = dist.all_to_all_single(
            arriving, packed, sizes_in, sizes_out, group=group, async_op=True
        )

        def wait() -> Parts:
            nonlocal packed
            work.wait()
            del packed  # it must exist until the transfer has ended
            return [*kept, *zip(receives, _split(arriving, receives), strict=True)]

        return wait

    def move(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        """Transfer everything now, between tensors of one dtype and device."""
        put(
            self.launch(sources.__getitem__, sources[0].dtype, sources[0].device, group)(),
            targets.__getitem__,
        )


def put(parts: Parts, targets: Callable[[int], Tensor]) -> None:
    """Copy received tensors into their regions. `targets`: function from the number of a tensor to
    the tensor."""
    if parts:
        foreach_copy_(
            [targets(route.item)[route.where] for route, _ in parts], [part for _, part in parts]
        )


def _split(flat: Tensor, routes: Sequence[TensorRegion]) -> list[Tensor]:
    parts = flat.split([route.numel for route in routes]) if routes else ()
    return [part.view(route.size) for part, route in zip(parts, routes, strict=True)]
