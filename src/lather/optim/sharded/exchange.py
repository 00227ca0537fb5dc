"""One exchange between the ranks over which parameters are spread: gradients are sent to the owners
of matrices, and updates back.

    RegionMember, AssembledMember   this rank's work on a parameter that is spread over ranks
    OwnerExchange                   the exchange of one batch of parameters
    Transfer                        one all-to-all of parts of tensors between the ranks of a mesh
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import Box, Index, gradient_dtype, local, local_grad
from lather.optim.batched.buckets import Member, States
from lather.optim.batched.pinned import is_offloaded
from lather.optim.batched.remainders import exact_weight, remainder_of
from lather.optim.batched.roster import REPLACEMENT, Change, ParamInfo
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit
from lather.profiled import profiled
from lather.torch_private import foreach_copy_


@dataclass(eq=False)
class RegionMember(Member):
    """A region of this rank's part of a parameter."""

    index: Index
    """Index of the region in this rank's part."""

    def part(self, x: Tensor) -> Tensor:
        return x[self.index]


@dataclass(eq=False)
class AssembledMember(Member):
    """Matrices that this rank owns, of which other ranks hold parts; its tensors exist during a
    step."""

    received: Tensor | None = None
    """Gradient, from the parts on all ranks."""
    received_weight: Tensor | None = None
    """Weight, from the parts on all ranks, if the update depends on it."""
    update: Tensor | None = None
    """Tensor into which the update is written before it is sent."""

    is_sent = True

    def grad(self) -> Tensor:
        assert self.received is not None
        return self.received

    def weight(self) -> Tensor:
        assert self.received_weight is not None
        return self.received_weight

    def target(self) -> Tensor:
        assert self.update is not None
        return self.update


def member_of(info: ParamInfo, share: OwnedParameter) -> Member | None:
    """Return the member for this rank's work on a parameter that is spread over ranks, or None if
    it has none."""
    if not share.owned_units:
        return None
    numbers = tuple(unit.number for unit in share.owned_units)
    if share.in_place:
        index = share.region.within(share.spread.box)
        layout = info.layout.of_part(
            share.region.size, contiguous=local(info.param)[index].is_contiguous()
        )
        return RegionMember(
            info.param, layout, range(layout.batch) if share.elementwise else numbers, index
        )
    layout = info.layout.of_part(info.layout.shape_with(len(numbers)))
    return AssembledMember(info.param, layout, numbers)


class OwnerExchange:
    """The exchange of one batch of similar parameters on one mesh, whose matrices are owned by
    other ranks than those that hold them.

    Call start_in and finish_in, then let the owners compute, then call start_out and finish_out.
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
        self.params, self.group = [info for info, _ in params], group
        shares = [share for _, share in params]
        first = self.params[0]
        self.device, self.elementwise = local(first.param).device, shares[0].elementwise
        self.grad_dtype, self.weight_dtype = gradient_dtype(first.param), first.param.dtype
        if first.layout.keeps_remainder:
            self.weight_dtype = torch.float32
        self.update_dtype = self.weight_dtype if self.elementwise else first.rule.compute_dtype
        self.needs_weights = first.needs_weights
        self.has_statistics = first.has_statistics and not is_offloaded(first.rule, self.device)
        """Whether there is a phase of statistics before that of updates; state that visits the
        device takes all phases at once."""
        if not self.elementwise:
            self.inward = Transfer(shares, inward=True)
        self.outward = Transfer(shares, inward=False)
        self._assembled = {
            item: member
            for item, info in enumerate(self.params)
            if isinstance(member := members.get(id(info.param)), AssembledMember)
        }
        """Number of a parameter -> its member, if this rank owns matrices of it and gathers
        them."""
        self._arriving: dict[str, Arriving] | None = None
        """Field of the members -> the transfer of its values; empty when they are there, None
        before they are sent."""
        self._leaving: list[Arriving] = []
        self._versions: list[int] = []
        """Versions of the settings of the parameters from which `_changes` were read."""
        self._changes: list[Change] = []

    def start_in(self, state: States) -> None:
        """Start to send gradients, and weights if the rule needs them, unless that has been done
        already. `state`: that of all parameters."""
        if self._arriving is not None or self.elementwise:
            return
        params = [info.param for info in self.params]
        sources = {"received": list(map(local_grad, params))}
        if self.needs_weights:
            sources["received_weight"] = [exact_weight(p, state[p]) for p in params]
        self._arriving = {
            name: self.inward.start(
                tensors.__getitem__, self._dtype_of(name), self.device, self.group
            )
            for name, tensors in sources.items()
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        return self.grad_dtype if name == "received" else self.weight_dtype

    @profiled("optim.exchange")
    def finish_in(self) -> None:
        """Assemble the received gradients and weights of the matrices that this rank owns, and
        allocate their updates."""
        for name, arriving in (self._arriving or {}).items():
            whole = {
                item: torch.empty(
                    member.layout.shape, dtype=self._dtype_of(name), device=self.device
                )
                for item, member in self._assembled.items()
            }
            put(arriving(), whole.__getitem__)
            for item, member in self._assembled.items():
                setattr(member, name, whole[item])
        self._arriving = {}
        for member in self._assembled.values():
            if member.update is None:
                member.update = torch.empty(
                    member.layout.shape, dtype=self.update_dtype, device=self.device
                )

    def start_out(self, state: States) -> None:
        """Start to send updates, and free the gradients."""
        params = [info.param for info in self.params]
        weights = [exact_weight(p, state[p]) for p in params] if self.elementwise else []

        def source(item: int) -> Tensor:
            update = None if self.elementwise else self._assembled[item].update
            return weights[item] if update is None else update

        leaving = self.outward.start(source, self.update_dtype, self.device, self.group)
        self.forget()
        self._leaving = [leaving]

    @profiled("optim.exchange")
    def finish_out(self, state: States) -> dict[tuple[Change, int], Changed]:
        """Receive the updates, and return for each change and t this rank's parts of the
        parameters, their updates, and their remainders if they have any."""
        versions = [info.settings.version for info in self.params]
        if versions != self._versions:
            self._versions, self._changes = versions, [info.change() for info in self.params]
        changes: dict[tuple[Change, int], Changed] = {}
        for route, update in self._leaving.pop()():
            info, change, step = self.params[route.item], self._changes[route.item], 0
            if self.elementwise:  # the owner has rounded, unless it sends exact weights
                rounding = "remainder" if info.layout.keeps_remainder else "nearest"
                change = REPLACEMENT._replace(rounding=rounding)
            elif change.rounding == "stochastic":
                step = int(state[info.param]["step"])
            weights, updates, remainders = changes.setdefault((change, step), ([], [], []))
            weights.append(local(info.param)[route.where])
            updates.append(update)
            if info.layout.keeps_remainder:
                remainders.append(remainder_of(state[info.param])[route.where])
        return changes

    def forget(self) -> None:
        """Free the tensors of this step, when the updates are being sent or after an error."""
        for member in self._assembled.values():
            member.received = member.received_weight = member.update = None
        self._arriving, self._leaving = None, []


Changed = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Weights, their updates, and their remainders if they have any."""


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
        self._local_copies: list[tuple[TensorRegion, TensorRegion]] = []
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
        me, positions = share.spread.position, share.spread.positions_of[box]
        overlap = box.overlap(unit.box)
        if overlap is None:
            return
        boxes = (box, share.origin(unit) if unit.owner == me else unit.box)
        source, target = (
            TensorRegion(item, overlap.within(outer), overlap.size) for outer in boxes
        )
        holder = unit.owner if unit.owner in positions else positions[unit.number % len(positions)]
        pairs = [(holder, unit.owner)]
        if not inward:
            source, target = target, source
            pairs = [(unit.owner, position) for position in positions]
        for sender, receiver in pairs:
            if sender == receiver == me:
                self._local_copies += [] if share.in_place else [(source, target)]
            elif sender == me:
                self._sends[receiver].append(source)
            elif receiver == me:
                self._receives[sender].append(target)

    def start(
        self,
        sources: Callable[[int], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> Arriving:
        """Start the all-to-all; all ranks of the group call this together. `sources`: function from
        the number of a tensor to this rank's tensor."""
        copies = [
            (target, sources(source.item)[source.where]) for source, target in self._local_copies
        ]
        if not self._is_needed:
            return lambda: copies
        sends, receives = list(chain(*self._sends)), list(chain(*self._receives))
        sizes_out, sizes_in = (
            [sum(region.numel for region in regions) for regions in of_ranks]
            for of_ranks in (self._sends, self._receives)
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
            return [*copies, *zip(receives, _split(arriving, receives), strict=True)]

        return wait

    def move(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        """Transfer everything now, from tensors of one dtype on a device to tensors anywhere."""
        put(
            self.start(sources.__getitem__, sources[0].dtype, sources[0].device, group)(),
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
