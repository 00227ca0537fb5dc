"""Parameters that are spread over ranks, and a step in which every rank works on the matrices that it owns, whole, once and for all.

Gradients go from their holders to the owners, updates from the owners to the holders, in one all-to-all each for every bucket of alike
parameters. Factors, bases and moments stay with the owner. While one bucket is computed the next one's gradients and the last one's
updates are on their way. The owner does what a process with the whole parameter would do, so the numbers are the same on every mesh.

    Sharding   the plan: where each parameter is, and who owns what of it
    Exchange   one bucket's way to the owners and back
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.engine.members import Member
from lather.optim.engine.plan import apply_
from lather.optim.engine.roster import ParamInfo, comparable
from lather.optim.engine.state import compute_dtype
from lather.optim.rule import Rule
from lather.optim.sharded.exchange import Arriving, Transfer, to_holders, to_owners
from lather.optim.sharded.owners import Share, rows_of_copies, share_out
from lather.optim.sharded.placement import Spread, is_dtensor, local, local_grad, spread_key, spread_of_dtensor, spread_of_shard
from lather.torch_private import foreach_copy_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class Sharding:
    """Where an optimizer's parameters are, and who owns what of them."""

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        """`tp_group`: of plain tensor-parallel shards, which have a `partition_dim` in their parameter group."""
        self.tp_group = tp_group
        self._spreads: dict[Any, Spread] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._shares: dict[int, Share] = {}
        self._loads: dict[tuple[int, ...], dict[int, float]] = {}
        self._tp_mesh: DeviceMesh | None = None
        self._exchanges: tuple[list[ParamInfo], list[Exchange]] = ([], [])

    def spread_of(self, p: Tensor, group: Mapping[str, Any], name: str = "parameter") -> Spread | None:
        """None for a parameter that this process has to itself. Raises ValueError for one that cannot be served."""
        key = spread_key(p, group)
        if key is None:
            return None
        if key not in self._spreads:
            self._spreads[key] = self._spread(p, group, name)
        return self._spreads[key]

    def _spread(self, p: Tensor, group: Mapping[str, Any], name: str) -> Spread:
        if is_dtensor(p):
            spread = spread_of_dtensor(p, name)
            if p.device_mesh.ndim == 1 and tuple(dist.get_process_group_ranks(p.device_mesh.get_group())) == spread.ranks:
                self._groups.setdefault(spread.ranks, p.device_mesh.get_group())
            return spread
        dim = group["partition_dim"]
        if dim not in (0, 1, None) or isinstance(dim, bool) or (dim is not None and dim >= p.dim()):
            raise ValueError(f"partition_dim={dim!r} of {name} with shape {tuple(p.shape)} is not valid: give 0, 1 (a dim of it) or None")
        if self.tp_group is None:
            raise ValueError(f"partition_dim={dim!r} of {name} needs tp_group=, the process group whose ranks have the other shards")
        spread = spread_of_shard(tuple(p.shape), dim, self.tp_group)
        self._groups.setdefault(spread.ranks, self.tp_group)
        return spread

    @property
    def has_shares(self) -> bool:
        """Whether any parameter is spread."""
        return bool(self._shares)

    def mesh_of(self, one: ParamInfo) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh of a spread parameter, and how it is placed there."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard

        p = one.param
        if is_dtensor(p):
            return p.device_mesh, tuple(p.placements)
        assert self.tp_group is not None
        if self._tp_mesh is None:
            self._tp_mesh = DeviceMesh.from_group(self.tp_group, p.device.type)
        dim = one.settings.group["partition_dim"]
        return self._tp_mesh, (Replicate() if dim is None else Shard(dim),)

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of a mesh's ranks. The first call for a mesh of several axes makes one: all its ranks call."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def share_of(self, p: Tensor) -> Share | None:
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
            self._check_same(ranks, [one for one, _ in new[ranks]])
            self._plan_mesh(ranks, new[ranks])

    def forget_changed(self, params: Sequence[ParamInfo]) -> None:
        """All shares, if options on which one depends have changed: `plan` makes them anew. For loading, which replaces all state."""
        if not all(self._still_fits(one) for one in params):
            self._shares.clear()
            self._loads.clear()
            self._exchanges = ([], [])

    def _still_fits(self, one: ParamInfo) -> bool:
        share = self.share_of(one.param)
        return share is None or (share.layout == one.layout and share.is_gathered == _is_gathered(one))

    def rows_of(self, one: ParamInfo, shape: tuple[int, ...]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """How an entry of state of this shape is cut into rows along dim 0, on every axis of the parameter's mesh."""
        from torch.distributed.tensor import Replicate, Shard

        mesh, _ = self.mesh_of(one)
        return mesh, ((Shard(0) if shape else Replicate()),) * mesh.ndim

    def _check_same(self, ranks: tuple[int, ...], params: Sequence[ParamInfo]) -> None:
        text = repr(
            [(one.layout.shape, str(one.param.dtype), str(_placement(one)), one.layout, *_said_of(one.settings.rule)) for one in params]
        )
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        own = torch.tensor([number, -number], dtype=torch.int64, device=local(params[0].param).device)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group_of(ranks))
        largest, smallest = own.tolist()
        if largest != -smallest:
            raise ValueError(
                f"the ranks {list(ranks)} give the optimizer different parameters or options: give all of them the same parameters, "
                "in the same order, with the same options"
            )

    def _plan_mesh(self, ranks: tuple[int, ...], params: Sequence[tuple[ParamInfo, Spread]]) -> None:
        loads = dict.fromkeys(ranks, 0.0)
        for others, theirs in self._loads.items():
            if set(ranks) <= set(others):  # only then do all ranks here know of it
                loads = {rank: load + theirs[rank] for rank, load in loads.items()}
        matrices = [(one, spread) for one, spread in params if one.layout.kind != "elements" and not _is_gathered(one)]
        shared = share_out([(spread, one.layout) for one, spread in matrices], loads)
        units = {id(one): own for (one, _), own in zip(matrices, shared, strict=True)}
        done = self._loads.setdefault(ranks, dict.fromkeys(ranks, 0.0))
        for one, spread in params:
            own = () if _is_gathered(one) else tuple(units.get(id(one)) or (() if id(one) in units else rows_of_copies(spread)))
            elementwise = not _is_gathered(one) and id(one) not in units
            self._shares[id(one.param)] = Share(spread, one.layout, own, elementwise=elementwise, is_gathered=_is_gathered(one))
            for unit in () if elementwise else own:
                done[ranks[unit.owner]] += one.rule.cost(one.layout.matrix)

    def exchanges(self, params: Sequence[ParamInfo]) -> list[Exchange]:
        """The exchanges of a step that these take, alike and in one order on all ranks; parameters of which nothing travels have none."""
        params = [one for one in params if (share := self.share_of(one.param)) is not None and share.travels]
        if params != self._exchanges[0]:
            self._exchanges = (params, self._make_exchanges(params))
        return self._exchanges[1]

    def _make_exchanges(self, params: Sequence[ParamInfo]) -> list[Exchange]:
        alike: dict[Any, list[list[ParamInfo]]] = {}
        filled: dict[Any, float] = {}
        for one in params:
            share, rule = self._shares[id(one.param)], one.rule
            layout, dtype = share.layout, compute_dtype(rule)
            key = (share.spread.ranks, layout.kind, layout.inner, one.param.dtype, dtype, share.elementwise, one.needs_weights, type(rule))
            size = math.prod(share.spread.shape) / len(share.spread.ranks) * dtype.itemsize
            if key not in alike or filled[key] + size > rule.bucket_bytes:
                alike.setdefault(key, []).append([])
                filled[key] = 0.0
            alike[key][-1].append(one)
            filled[key] += size
        made = []
        for some in (members for groups in alike.values() for members in groups):
            shares = [self._shares[id(one.param)] for one in some]
            made.append(Exchange(some, shares, self.group_of(shares[0].spread.ranks)))
        return made


def _is_gathered(one: ParamInfo) -> bool:
    """Whether all ranks work on it alike."""
    return one.spread is not None and one.layout.kind != "elements" and one.rule.ownership == "replicated"


def _placement(one: ParamInfo) -> object:
    """Said alike on all ranks."""
    p = one.param
    return (tuple(p.device_mesh.mesh.shape), p.placements) if is_dtensor(p) else one.settings.group["partition_dim"]


def _said_of(rule: Rule) -> tuple[str, ...]:
    """Of the options, those on which state and layout depend, alike on all ranks."""
    return (type(rule).__qualname__, rule.ownership, rule.matrix_layout, str(comparable(rule.state_dtype)), str(rule.keep_norm))


class Exchange:
    """Alike parameters of one mesh whose matrices are owned by other ranks than those that hold them.

    launch_in, finish_in, then the owners compute, launch_out, finish_out. Of elementwise ones only weights travel, to the other copies.
    """

    def __init__(self, params: Sequence[ParamInfo], shares: Sequence[Share], group: dist.ProcessGroup) -> None:
        self.params, self.shares, self.group = list(params), list(shares), group
        self.dtype, self.needs_weights = compute_dtype(params[0].rule), params[0].needs_weights
        self.has_statistics = params[0].has_statistics
        self.elementwise = shares[0].elementwise
        self.inward = Transfer(len(shares[0].spread.ranks)) if self.elementwise else to_owners(shares)
        self.outward = to_holders(shares)
        self._arriving: list[Arriving] = []
        self._leaving: Arriving | None = None
        self._is_in = False

    @property
    def device(self) -> torch.device:
        return local(self.params[0].param).device

    def launch_in(self) -> None:
        """Gradients set out. Nothing happens if they have."""
        if self._is_in or self.elementwise:
            return
        self._is_in = True
        grads = [local_grad(one.param) for one in self.params]
        sources = [grads] + ([[local(one.param) for one in self.params]] if self.needs_weights else [])
        dtype = self.params[0].param.dtype
        self._arriving = [self.inward.launch(some.__getitem__, dtype, self.device, self.group) for some in sources]

    def finish_in(self, members: Mapping[int, Member]) -> None:
        """Owners put together what has arrived, and make room for updates. `members`: by id of the parameter."""
        own = self._owned(members)
        for name, arriving in zip(("received", "received_weight"), self._arriving, strict=False):
            for member in own.values():
                setattr(member, name, torch.empty(member.layout.shape, dtype=member.param.dtype, device=self.device))
            parts = arriving.wait()
            if parts:
                foreach_copy_([getattr(own[route.item], name)[route.where] for route, _ in parts], [part for _, part in parts])
        self._arriving = []
        for member in own.values():
            if member.update is None:
                member.update = torch.empty(member.layout.shape, dtype=self.dtype, device=self.device)

    def launch_out(self, members: Mapping[int, Member]) -> None:
        """Updates set out; the gradients are gone."""
        own = self._owned(members)
        updates = {item: member.update for item, member in own.items()}

        def source(item: int) -> Tensor:
            update = updates.get(item)
            return local(self.params[item].param) if update is None else update

        dtype = self.params[0].param.dtype if self.elementwise else self.dtype
        self._leaving = self.outward.launch(source, dtype, self.device, self.group)
        for member in own.values():
            member.received = member.received_weight = member.update = None
        self._is_in = False

    def finish_out(self) -> None:
        """Every rank changes what it holds."""
        assert self._leaving is not None
        by_rates: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
        for route, update in self._leaving.wait():
            one = self.params[route.item]
            weights, updates = by_rates.setdefault(one.rates(), ([], []))
            weights.append(local(one.param)[route.where])
            updates.append(update)
        for (lr, decay), (weights, updates) in by_rates.items():
            if self.elementwise:
                foreach_copy_(weights, updates)
            else:
                apply_(weights, updates, lr, decay)
        self._leaving = None

    def forget(self, members: Mapping[int, Member]) -> None:
        """After an error: nothing of this step is kept."""
        for member in self._owned(members).values():
            member.received = member.received_weight = member.update = None
        self._arriving, self._leaving, self._is_in = [], None, False

    def _owned(self, members: Mapping[int, Member]) -> dict[int, Member]:
        """By number, what was put together here."""
        found = ((item, members.get(id(one.param))) for item, one in enumerate(self.params))
        return {item: member for item, member in found if member is not None and member.index is None}
