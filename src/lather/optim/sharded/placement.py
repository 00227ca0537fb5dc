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
from collections.abc import Mapping, Sequence
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
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.offset, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box | None:
        """What is in both; None if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = map(min, self.stop, other.stop)
        size = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, size) if min(size, default=1) > 0 else None

    def within(self, outer: Box) -> Index:
        """The index of this box in a tensor that holds `outer`."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))


@dataclass(frozen=True, eq=False)
class Spread:
    """A tensor over the ranks of a mesh."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    ranks: tuple[int, ...]
    """Global ranks by position."""
    boxes: tuple[Box, ...]
    """What each position holds."""
    position: int
    """Of this rank."""

    @property
    def box(self) -> Box:
        """What is here."""
        return self.boxes[self.position]

    @cached_property
    def positions_of(self) -> dict[Box, tuple[int, ...]]:
        """The positions that hold each of the boxes; several where there are copies."""
        found: dict[Box, list[int]] = {}
        for position, box in enumerate(self.boxes):
            found.setdefault(box, []).append(position)
        return {box: tuple(positions) for box, positions in found.items()}

    @property
    def num_copies(self) -> int:
        """How many positions hold what is here."""
        return len(self.positions_of[self.box])

    def holders(self, box: Box) -> tuple[int, ...]:
        """The positions that hold all of `box`."""
        return tuple(position for own, positions in self.positions_of.items() if own.overlap(box) == box for position in positions)


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Without importing DTensor, which takes longer than all of this package: nothing is one as long as nobody has imported it."""
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
    """What is here of the gradient; zeros if only other ranks have one."""
    return torch.zeros_like(local(p)) if p.grad is None else local(p.grad)


def chunk(length: int, num: int, number: int) -> tuple[int, int]:
    """Start and length of chunk `number` of `num`, as torch cuts: equal ones, rounded up, so that the last may be shorter or empty."""
    size = -(-length // num)
    start = min(number * size, length)
    return start, min(size, length - start)


def box_at(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinates: Sequence[int]) -> Box:
    """What the rank at these mesh coordinates holds of a tensor of `shape`.

    A strided shard says that the tensor was cut along later mesh axes first: FSDP2 cuts what tensor parallelism has cut.
    """
    offset, size = [0] * len(shape), list(shape)
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    for axis in [*(a for a in axes if not _is_strided(placements[a])), *(a for a in reversed(axes) if _is_strided(placements[a]))]:
        dim = placements[axis].dim % len(shape)  # type: ignore[attr-defined]
        start, size[dim] = chunk(size[dim], mesh_shape[axis], coordinates[axis])
        offset[dim] += start
    return Box(tuple(offset), tuple(size))


def boxes_of(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> tuple[Box, ...]:
    """What the ranks of a mesh hold, row by row."""
    return tuple(box_at(shape, mesh_shape, placements, place) for place in _coordinates(mesh_shape))


def _is_strided(placement: Placement) -> bool:
    return getattr(placement, "split_factor", 1) > 1


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
    spread = spread_on(x.device_mesh, tuple(x.shape), x.placements)
    found = tuple(local(x).shape)
    if found != spread.box.size:
        raise ValueError(
            f"{name} has shape {found} here, but its placements {tuple(x.placements)} say {spread.box.size}: make it with "
            "distribute_tensor, or DTensor.from_local with the shape of the whole tensor"
        )
    return spread


def spread_on(mesh: DeviceMesh, shape: tuple[int, ...], placements: Sequence[Placement]) -> Spread:
    """Of a tensor of `shape` that is placed so on `mesh`, of which this rank is one."""
    ranks = mesh.mesh.flatten().tolist()
    boxes = boxes_of(shape, tuple(mesh.mesh.shape), placements)
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    ascending = tuple(ranks[i] for i in order)
    return Spread(shape, ascending, tuple(boxes[i] for i in order), ascending.index(dist.get_rank()))


def _coordinates(shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, shape)))


def spread_of_shard(shape: Sequence[int], dim: int | None, group: dist.ProcessGroup) -> Spread:
    """Of a plain tensor that is one of equal shards along `dim`, or a copy. Raises ValueError for a group in another order of ranks."""
    num, whole = dist.get_world_size(group), list(shape)
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks != tuple(sorted(ranks)):
        raise ValueError(f"tp_group has its ranks in the order {list(ranks)}: make it with ascending ranks (new_group(sort_ranks=True))")
    boxes = [Box.whole(shape)] * num
    if dim is not None:
        whole[dim] *= num
        offsets = [tuple(position * shape[dim] if d == dim else 0 for d in range(len(shape))) for position in range(num)]
        boxes = [Box(offset, tuple(shape)) for offset in offsets]
    return Spread(tuple(whole), ranks, tuple(boxes), dist.get_rank(group))


def spread_key(p: Tensor, group: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Equal for parameters that are spread alike; None for those that are not spread."""
    if is_dtensor(p):
        return ("dtensor", tuple(p.shape), p.device_mesh, tuple(p.placements))
    if "partition_dim" in group:
        return ("shard", tuple(p.shape), group["partition_dim"])
    return None
