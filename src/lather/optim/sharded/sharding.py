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
from lather.optim.sharded.exchange import Arriving, Transfer, in_batches, put
from lather.optim.sharded.owners import Share, rows_of_copies, share_out
from lather.optim.sharded.placement import Spread, is_dtensor, local, local_grad, spread_of_dtensor, spread_of_shard
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
        """One for all parameters that are spread alike."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._shares: dict[int, Share] = {}
        self._tp_mesh: DeviceMesh | None = None

    def spread_of(self, p: Tensor, group: Mapping[str, Any], name: str = "parameter") -> Spread | None:
        """None for a parameter that this process has to itself. Raises ValueError for one that cannot be served."""
        if not is_dtensor(p) and "partition_dim" not in group:
            return None
        key = (tuple(p.shape), *((p.device_mesh, tuple(p.placements)) if is_dtensor(p) else (group["partition_dim"],)))
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

    def placed(self, one: ParamInfo, shape: tuple[int, ...] | None = None) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh of a spread parameter, and how it is placed there; or, given its shape, how an entry of its state is cut into rows, that
        is along dim 0 on every axis of the mesh."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard

        p = one.param
        if not is_dtensor(p) and self._tp_mesh is None:
            assert self.tp_group is not None
            self._tp_mesh = DeviceMesh.from_group(self.tp_group, p.device.type)
        mesh = p.device_mesh if is_dtensor(p) else self._tp_mesh
        assert mesh is not None
        if shape is not None:
            return mesh, ((Shard(0) if shape else Replicate()),) * mesh.ndim
        if is_dtensor(p):
            return mesh, tuple(p.placements)
        dim = one.settings.group["partition_dim"]
        return mesh, (Replicate() if dim is None else Shard(dim),)

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

    def _still_fits(self, one: ParamInfo) -> bool:
        share = self.share_of(one.param)
        return share is None or (share.layout == one.layout and share.is_gathered == _is_gathered(one))

    def _check_same(self, ranks: tuple[int, ...], params: Sequence[ParamInfo]) -> None:
        said = []
        for one in params:
            p, rule = one.param, one.settings.rule
            place: Any = (tuple(p.device_mesh.mesh.shape), p.placements) if is_dtensor(p) else one.settings.group["partition_dim"]
            options = (type(rule).__qualname__, rule.ownership, rule.matrix_layout, comparable(rule.state_dtype), rule.keep_norm)
            said.append((one.layout.shape, str(p.dtype), str(place), one.layout, *map(str, options)))
        number = int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7])
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
        for share in self._shares.values():
            if set(ranks) <= set(share.spread.ranks) and not share.elementwise:  # only then do all ranks here know of it
                cost = share.layout.rule.cost(share.layout.matrix)
                for unit in share.units:
                    loads[share.spread.ranks[unit.owner]] = loads.get(share.spread.ranks[unit.owner], 0.0) + cost
        matrices = [(one, spread) for one, spread in params if one.layout.kind != "elements" and not _is_gathered(one)]
        shared = share_out([(spread, one.layout) for one, spread in matrices], loads)
        units = {id(one): own for (one, _), own in zip(matrices, shared, strict=True)}
        for one, spread in params:
            elementwise = one.layout.kind == "elements"
            own = tuple(rows_of_copies(spread) if elementwise else units.get(id(one), ()))
            self._shares[id(one.param)] = Share(spread, one.layout, own, elementwise, is_gathered=_is_gathered(one))

    def exchanges(self, params: Sequence[ParamInfo]) -> list[Exchange]:
        """The exchanges of a step that these take, alike and in one order on all ranks; parameters of which nothing travels have none."""
        wanted = []
        for one in params:
            share, rule, dtype = self.share_of(one.param), one.rule, compute_dtype(one.rule)
            if share is not None and share.travels:
                ranks, layout = share.spread.ranks, share.layout
                key = (ranks, layout.kind, layout.inner, one.param.dtype, dtype, share.elementwise, one.needs_weights, type(rule))
                size = math.prod(layout.shape) / len(ranks) * dtype.itemsize
                wanted.append(((one, share), key, size / rule.bucket_bytes))
        return [Exchange(some, self.group_of(some[0][1].spread.ranks)) for some in in_batches(wanted)]


def _is_gathered(one: ParamInfo) -> bool:
    """Whether all ranks work on it alike."""
    return one.spread is not None and one.layout.kind != "elements" and one.rule.ownership == "replicated"


class Exchange:
    """Alike parameters of one mesh whose matrices are owned by other ranks than those that hold them.

    launch_in, finish_in, then the owners compute, launch_out, finish_out. Of elementwise ones only weights travel, to the other copies.
    """

    def __init__(self, params: Sequence[tuple[ParamInfo, Share]], group: dist.ProcessGroup) -> None:
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
        """By number, what was put together here."""
        found = ((item, members.get(id(one.param))) for item, one in enumerate(self.params))
        return {item: member for item, member in found if member is not None and member.index is None}
