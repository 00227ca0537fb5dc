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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.buckets import apply_
from lather.optim.exchange import Arriving, Transfer, to_holders, to_owners
from lather.optim.layout import Layout, layout_of
from lather.optim.members import Member, layout_options, local_grad
from lather.optim.owners import Share, matrix_cost, rows_of_copies, share_out
from lather.optim.placement import Spread, is_dtensor, local, spread_key, spread_of_dtensor, spread_of_shard
from lather.optim.state import compute_dtype
from lather.torch_private import foreach_copy_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Params = Iterable[tuple[Tensor, dict[str, Any]]]
"""Parameters with their groups."""


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
        self._exchanges: dict[Any, list[Exchange]] = {}

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

    def layout_of(self, p: Tensor, group: Mapping[str, Any]) -> Layout:
        """Of the whole parameter."""
        spread = self.spread_of(p, group)
        if spread is None:
            return layout_of(tuple(p.shape), group, contiguous=p.is_contiguous())
        return layout_of(spread.shape, group)

    def mesh_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh of a spread parameter, and how it is placed there."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard

        if is_dtensor(p):
            return p.device_mesh, tuple(p.placements)
        assert self.tp_group is not None
        if self._tp_mesh is None:
            self._tp_mesh = DeviceMesh.from_group(self.tp_group, p.device.type)
        dim = group["partition_dim"]
        return self._tp_mesh, (Replicate() if dim is None else Shard(dim),)

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of a mesh's ranks. The first call for a mesh of several axes makes one: all its ranks call."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def share_of(self, p: Tensor) -> Share | None:
        """Who owns what of a parameter that was planned; None for one that is not spread."""
        return self._shares.get(id(p))

    def plan(self, params: Params) -> None:
        """Owners for those that have none yet; those of others stay. Every rank of their meshes calls it with the same parameters.

        Raises ValueError, on all of these, if the parameters are not the same, or if options on which what is kept depends have changed.
        """
        new: dict[tuple[int, ...], list[tuple[Tensor, dict[str, Any], Spread]]] = {}
        for p, group in params:
            spread = self.spread_of(p, group)
            if spread is not None and id(p) not in self._shares:
                new.setdefault(spread.ranks, []).append((p, group, spread))
            elif spread is not None and not self._still_fits(p, group):
                raise ValueError(
                    f"matrix_layout, max_precond_dim, precondition_1d, ownership or a limit on the update of a sharded parameter of shape "
                    f"{spread.shape} was changed after its state was made: save its state_dict(), make the optimizer anew with the new "
                    "options, and load what still fits"
                )
        for ranks in sorted(new, key=lambda ranks: (-len(ranks), ranks)):
            self._check_same(ranks, new[ranks])
            self._plan_mesh(ranks, new[ranks])

    def forget_changed(self, params: Params) -> None:
        """All shares, if options on which one depends have changed: `plan` makes them anew. For loading, which replaces all state."""
        if not all(self._still_fits(p, group) for p, group in params):
            self._shares.clear()
            self._loads.clear()
            self._exchanges.clear()

    def _still_fits(self, p: Tensor, group: Mapping[str, Any]) -> bool:
        share = self.share_of(p)
        return share is None or (share.layout, share.is_gathered) == self._layout_and_way(share.spread, group)

    @staticmethod
    def _layout_and_way(spread: Spread, group: Mapping[str, Any]) -> tuple[Layout, bool]:
        """The layout of a whole parameter, and whether all ranks gather it."""
        layout = layout_of(spread.shape, group)
        return layout, layout.kind != "elements" and group["ownership"] == "replicated"

    def rows_of(self, p: Tensor, group: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """How an entry of state of this shape is cut into rows along dim 0, on every axis of the parameter's mesh."""
        from torch.distributed.tensor import Replicate, Shard

        mesh, _ = self.mesh_of(p, group)
        return mesh, ((Shard(0) if shape else Replicate()),) * mesh.ndim

    def _check_same(self, ranks: tuple[int, ...], members: Sequence[tuple[Tensor, dict[str, Any], Spread]]) -> None:
        text = repr(
            [
                (spread.shape, str(p.dtype), str(self._placement(p, group)), group["ownership"], *map(str, layout_options(group)))
                for p, group, spread in members
            ]
        )
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        own = torch.tensor([number, -number], dtype=torch.int64, device=local(members[0][0]).device)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group_of(ranks))
        largest, smallest = own.tolist()
        if largest != -smallest:
            raise ValueError(
                f"the ranks {list(ranks)} give the optimizer different parameters or options: give all of them the same parameters, "
                "in the same order, with the same options"
            )

    def _placement(self, p: Tensor, group: Mapping[str, Any]) -> object:
        """Said alike on all ranks."""
        return (tuple(p.device_mesh.mesh.shape), p.placements) if is_dtensor(p) else group["partition_dim"]

    def _plan_mesh(self, ranks: tuple[int, ...], members: Sequence[tuple[Tensor, dict[str, Any], Spread]]) -> None:
        loads = dict.fromkeys(ranks, 0.0)
        for others, theirs in self._loads.items():
            if set(ranks) <= set(others):  # only then do all ranks here know of it
                loads = {rank: load + theirs[rank] for rank, load in loads.items()}
        layouts, alike = zip(*[self._layout_and_way(spread, group) for _, group, spread in members], strict=True)
        matrices = [i for i, layout in enumerate(layouts) if layout.kind != "elements" and not alike[i]]
        units = dict(zip(matrices, share_out([(members[i][2], layouts[i]) for i in matrices], loads), strict=True))
        done = self._loads.setdefault(ranks, dict.fromkeys(ranks, 0.0))
        for i, ((p, _, spread), layout) in enumerate(zip(members, layouts, strict=True)):
            if alike[i]:
                self._shares[id(p)] = Share(spread, layout, (), elementwise=False, is_gathered=True)
                continue
            share = Share(spread, layout, tuple(units[i] if i in units else rows_of_copies(spread)), elementwise=i not in units)
            self._shares[id(p)] = share
            if not share.elementwise:
                for unit in share.units:
                    done[ranks[unit.owner]] += matrix_cost(layout.inner, layout.factor_dims)

    def exchanges(self, params: Params, couples_decay: Callable[[Mapping[str, Any]], bool]) -> list[Exchange]:
        """The exchanges of a step that these take, alike and in one order on all ranks; parameters of which nothing travels have none."""
        params = [(p, group) for p, group in params if self._travels(p)]
        key = tuple((id(p), id(group), couples_decay(group)) for p, group in params)
        if key not in self._exchanges:
            self._exchanges = {key: self._make_exchanges(params, couples_decay)}
        return self._exchanges[key]

    def _travels(self, p: Tensor) -> bool:
        share = self.share_of(p)
        return share is not None and share.travels

    def _make_exchanges(self, params: Params, couples_decay: Callable[[Mapping[str, Any]], bool]) -> list[Exchange]:
        alike: dict[Any, list[list[tuple[Tensor, dict[str, Any]]]]] = {}
        filled: dict[Any, float] = {}
        for p, group in params:
            share = self._shares[id(p)]
            layout, dtype = share.layout, compute_dtype(group)
            key = (share.spread.ranks, layout.kind, layout.inner, p.dtype, dtype, share.elementwise, couples_decay(group))
            size = math.prod(share.spread.shape) / len(share.spread.ranks) * dtype.itemsize
            if key not in alike or filled[key] + size > group["bucket_bytes"]:
                alike.setdefault(key, []).append([])
                filled[key] = 0.0
            alike[key][-1].append((p, group))
            filled[key] += size
        made = []
        for key, some in alike.items():
            for members in some:
                shares = [self._shares[id(p)] for p, _ in members]
                made.append(Exchange(members, shares, self.group_of(shares[0].spread.ranks), key[4], couples_decay=key[-1]))
        return made


class Exchange:
    """Alike parameters of one mesh whose matrices are owned by other ranks than those that hold them.

    launch_in, finish_in, then the owners compute, launch_out, finish_out. Of elementwise ones only weights travel, to the other copies.
    """

    def __init__(
        self,
        params: Sequence[tuple[Tensor, dict[str, Any]]],
        shares: Sequence[Share],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        *,
        couples_decay: bool,
    ) -> None:
        """`dtype`: of updates; `couples_decay`: owners need weights as well."""
        self.params, self.shares, self.group, self.dtype, self.couples_decay = list(params), list(shares), group, dtype, couples_decay
        self.elementwise = shares[0].elementwise
        self.inward = Transfer(len(shares[0].spread.ranks)) if self.elementwise else to_owners(shares)
        self.outward = to_holders(shares)
        self._arriving: list[Arriving] = []
        self._leaving: Arriving | None = None
        self._is_in = False

    @property
    def device(self) -> torch.device:
        return local(self.params[0][0]).device

    def launch_in(self) -> None:
        """Gradients set out. Nothing happens if they have."""
        if self._is_in or self.elementwise:
            return
        self._is_in = True
        grads = [local_grad(p) for p, _ in self.params]
        sources = [grads] + ([[local(p) for p, _ in self.params]] if self.couples_decay else [])
        dtype = self.params[0][0].dtype
        self._arriving = [self.inward.launch(some.__getitem__, dtype, self.device, self.group) for some in sources]

    def finish_in(self, members: Mapping[int, Member]) -> None:
        """Owners put together what has arrived, and make room for updates. `members`: by id of the parameter."""
        own = self._owned(members)
        for name, arriving in zip(("received", "received_weight"), self._arriving, strict=False):
            for member in own.values():
                setattr(member, name, torch.empty(member.shape, dtype=member.dtype, device=self.device))
            parts = arriving.wait()
            if parts:
                foreach_copy_([getattr(own[route.item], name)[route.where] for route, _ in parts], [part for _, part in parts])
        self._arriving = []
        for member in own.values():
            if member.update is None:
                member.update = torch.empty(member.shape, dtype=self.dtype, device=self.device)

    def launch_out(self, members: Mapping[int, Member]) -> None:
        """Updates set out; the gradients are gone."""
        own = self._owned(members)
        updates = {item: member.update for item, member in own.items()}

        def source(item: int) -> Tensor:
            update = updates.get(item)
            return local(self.params[item][0]) if update is None else update

        dtype = self.params[0][0].dtype if self.elementwise else self.dtype
        self._leaving = self.outward.launch(source, dtype, self.device, self.group)
        for member in own.values():
            member.received = member.received_weight = member.update = None
        self._is_in = False

    def finish_out(self, rates: Callable[[Mapping[str, Any]], tuple[float, float]]) -> None:
        """Every rank changes what it holds. `rates`: a group's learning rate, and the share that weight decay takes away."""
        assert self._leaving is not None
        by_rates: dict[tuple[float, float], list[tuple[Tensor, Tensor]]] = {}
        for route, update in self._leaving.wait():
            p, group = self.params[route.item]
            by_rates.setdefault(rates(group), []).append((local(p)[route.where], update))
        for (lr, decay), changes in by_rates.items():
            if self.elementwise:
                foreach_copy_([part for part, _ in changes], [weight for _, weight in changes])
            else:
                apply_(changes, lr, decay)
        self._leaving = None

    def forget(self, members: Mapping[int, Member]) -> None:
        """After an error: nothing of this step is kept."""
        for member in self._owned(members).values():
            member.received = member.received_weight = member.update = None
        self._arriving, self._leaving, self._is_in = [], None, False

    def _owned(self, members: Mapping[int, Member]) -> dict[int, Member]:
        """By number, what was put together here."""
        found = ((item, members.get(id(p))) for item, (p, _) in enumerate(self.params))
        return {item: member for item, member in found if member is not None and member.index is None}
