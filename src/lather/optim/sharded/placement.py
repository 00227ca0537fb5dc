"""Where the parts of a parameter are: which box of the whole tensor each rank of its mesh holds.

    DTensor                      any mesh, any mix of Shard and Replicate, and the strided shards that FSDP2 makes of tensor-parallel ones
    plain tensor, partition_dim  one tensor-parallel shard, of equal size on every rank of `tp_group`; None: a copy on each
    plain tensor                 this process has it to itself

A *position* is a number of a rank within the mesh, in ascending order of ranks, as process groups have them. What is here depends on shapes
and placements alone, so that every rank knows what every other one holds, and nobody has to ask.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A range of every dim of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def cut(self, dim: int, num: int, number: int) -> Box:
        """Chunk `number` of `num` along `dim`."""
        start, length = chunk(self.size[dim], num, number)
        offset = (*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1 :])
        return Box(offset, (*self.size[:dim], length, *self.size[dim + 1 :]))

    def overlap(self, other: Box) -> Box | None:
        """The box of what is in both; None if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True))
        size = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, size) if min(size, default=1) > 0 else None

    def within(self, outer: Box) -> Index:
        """The index of this box in a tensor that holds `outer`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.size, strict=True))


@dataclass(frozen=True, eq=False)
class Spread:
    """A tensor over the ranks of a mesh."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    ranks: tuple[int, ...]
    """Global ranks by position."""
    boxes: tuple[Box, ...]
    """Box that each position holds."""
    position: int
    """Position of this rank."""
    mesh: DeviceMesh | None = None
    """Mesh of the ranks; None only where nothing ever travels, as in plans for ranks that are not there."""
    placements: tuple[Placement, ...] = ()
    """Placements on the mesh, one for each of its axes."""

    @property
    def box(self) -> Box:
        """The box that this rank holds."""
        return self.boxes[self.position]

    @cached_property
    def positions_of(self) -> dict[Box, tuple[int, ...]]:
        """The positions that hold each of the boxes; several where there are copies."""
        found: dict[Box, tuple[int, ...]] = {}
        for position, box in enumerate(self.boxes):
            found[box] = (*found.get(box, ()), position)
        return found

    def holders(self, box: Box) -> tuple[int, ...]:
        """The positions that hold all of `box`."""
        return tuple(position for own, positions in self.positions_of.items() if own.overlap(box) == box for position in positions)

    def rows(self, shape: tuple[int, ...]) -> Spread:
        """How an entry of this shape of the parameter's state is cut into rows: along dim 0, on every axis of the mesh."""
        from torch.distributed.tensor import Replicate, Shard

        assert self.mesh is not None
        return spread_on(self.mesh, shape, ((Shard(0) if shape else Replicate()),) * self.mesh.ndim)


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor, without importing that class, which takes longer than this package: before that nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The part of `x` that is here, without its history."""
    if not is_dtensor(x):
        return x.detach()
    with torch.no_grad():  # `x.detach()` first would cost a dispatch through DTensor
        part: Tensor = x.to_local()
        return part


def local_grad(p: Tensor) -> Tensor:
    """The part of the gradient that is here; zeros if only other ranks have one."""
    return torch.zeros_like(local(p)) if p.grad is None else local(p.grad)


def chunk(length: int, num: int, number: int) -> tuple[int, int]:
    """Start and length of chunk `number` of `num`, as torch cuts: equal ones, rounded up, so that the last may be shorter or empty."""
    size = -(-length // num)
    start = min(number * size, length)
    return start, min(size, length - start)


def boxes_of(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> tuple[Box, ...]:
    """The boxes that the ranks of a mesh hold of a tensor of `shape`, row by row.

    A strided shard says that the tensor was cut along later mesh axes first: FSDP2 cuts what tensor parallelism has cut.
    """
    shards: list[tuple[int, Any]] = [(axis, placement) for axis, placement in enumerate(placements) if not placement.is_replicate()]
    strided = [(axis, placement) for axis, placement in shards if getattr(placement, "split_factor", 1) > 1]
    order = [*(shard for shard in shards if shard not in strided), *reversed(strided)]
    boxes = []
    for coordinates in product(*map(range, mesh_shape)):
        box = Box.whole(shape)
        for axis, placement in order:
            box = box.cut(placement.dim % len(shape), mesh_shape[axis], coordinates[axis])
        boxes.append(box)
    return tuple(boxes)


def spread_of_dtensor(x: DTensor, name: str) -> Spread:
    """Raises ValueError for placements that cannot be served."""
    for placement in x.placements:
        if not (placement.is_replicate() or placement.is_shard() or hasattr(placement, "split_factor")):
            raise ValueError(
                f"{name} has placements {tuple(x.placements)}; a matrix is put together of shards and copies, not of {placement}: "
                "give it after .redistribute(placements=...) with Shard or Replicate on every mesh axis"
            )
    if x.device_mesh.get_coordinate() is None:
        ranks = x.device_mesh.mesh.flatten().tolist()
        raise ValueError(f"{name} is on a mesh of ranks {ranks}, of which this rank is none: give it on those ranks only")
    spread = spread_on(x.device_mesh, tuple(x.shape), tuple(x.placements))
    found = tuple(local(x).shape)
    if found != spread.box.size:
        raise ValueError(
            f"{name} has shape {found} here, but its placements {tuple(x.placements)} say {spread.box.size}: make it with "
            "distribute_tensor, or DTensor.from_local with the shape of the whole tensor"
        )
    return spread


def spread_of_shard(x: Tensor, dim: int | None, group: dist.ProcessGroup | None, name: str) -> Spread:
    """Spread of a plain tensor, one of equal shards along `dim` or a copy. Raises ValueError for a dim or a group that cannot be."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    if dim not in (0, 1, None) or isinstance(dim, bool) or (dim is not None and dim >= x.dim()):
        raise ValueError(f"partition_dim={dim!r} of {name} with shape {tuple(x.shape)} is not valid: give 0, 1 (a dim of it) or None")
    if group is None:
        raise ValueError(f"partition_dim={dim!r} of {name} needs tp_group=, the process group whose ranks have the other shards")
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        raise ValueError(f"tp_group has its ranks in the order {ranks}: make it with ascending ranks (new_group(sort_ranks=True))")
    whole = tuple(n * len(ranks) if d == dim else n for d, n in enumerate(x.shape))
    return spread_on(DeviceMesh.from_group(group, x.device.type), whole, (Replicate() if dim is None else Shard(dim),))


def spread_on(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Spread:
    """The spread of a tensor of `shape` with these placements on `mesh`, of which this rank is one."""
    box_of = dict(zip(mesh.mesh.flatten().tolist(), boxes_of(shape, tuple(mesh.mesh.shape), placements), strict=True))
    ranks = tuple(sorted(box_of))
    return Spread(shape, ranks, tuple(box_of[rank] for rank in ranks), ranks.index(dist.get_rank()), mesh, placements)
