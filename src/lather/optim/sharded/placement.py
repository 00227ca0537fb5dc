"""Placement of a parameter: which box of the whole tensor each rank of its mesh holds.

    DTensor                      any mesh, any mix of Shard and Replicate, and the strided shards
                                 that FSDP2 makes of tensor-parallel ones
    plain tensor, partition_dim  one tensor-parallel shard, of equal size on every rank of
                                 `tp_group`; None: a copy on each rank
    plain tensor                 not spread over ranks

A *position* is the number of a rank within the mesh, in ascending order of ranks, as in process
groups. Boxes depend on shapes and placements alone, so every rank knows without communication what
every other rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lather.boxes import Box, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, eq=False)
class Spread:
    """The distribution of a tensor over the ranks of a mesh."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    ranks: tuple[int, ...]
    """Global rank of each position."""
    boxes: tuple[Box, ...]
    """Box of each position."""
    position: int
    """Position of this rank."""
    mesh: DeviceMesh | None = None
    """Mesh of the ranks; None if nothing is ever sent, as in plans for ranks that do not exist."""
    placements: tuple[Placement, ...] = ()
    """Placements, one for each axis of the mesh."""
    mesh_ranks: tuple[int, ...] = ()
    """Global ranks in the mesh's row-major order. torch computes them at every use, which takes
    longer than all the boxes of a tensor."""

    @cached_property
    def box(self) -> Box:
        """Box that this rank holds."""
        return self.boxes[self.position]

    @cached_property
    def positions_of(self) -> dict[Box, tuple[int, ...]]:
        """Box -> positions that hold it; several if there are copies."""
        positions: dict[Box, tuple[int, ...]] = {}
        for position, box in enumerate(self.boxes):
            positions[box] = (*positions.get(box, ()), position)
        return positions

    def holders(self, box: Box) -> tuple[int, ...]:
        """Return the positions that hold the whole of `box`."""
        if box in self.positions_of and box.numel:
            return self.positions_of[box]  # boxes are equal or have nothing in common
        return tuple(
            position
            for candidate, positions in self.positions_of.items()
            if candidate.overlap(box) == box
            for position in positions
        )

    def rows(self, shape: tuple[int, ...]) -> Spread:
        """Return the spread of an entry of the parameter's state with this shape: sharded along dim
        0 on every axis of the mesh."""
        from torch.distributed.tensor import Replicate, Shard

        assert self.mesh is not None
        placements = ((Shard(0) if shape else Replicate()),) * self.mesh.ndim
        return spread_on(self.mesh, shape, placements, self.mesh_ranks)

    def alike(self, shape: tuple[int, ...]) -> Spread:
        """Return the spread of a tensor that has this shape, and the placements of this one."""
        if shape == self.shape:
            return self
        assert self.mesh is not None
        return spread_on(self.mesh, shape, self.placements, self.mesh_ranks)


def boxes_of(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> tuple[Box, ...]:
    """Return the boxes of a tensor of `shape` that the ranks of a mesh hold, in the mesh's
    row-major order.

    A strided shard means that later mesh axes were sharded first: FSDP2 shards what tensor
    parallelism has sharded.
    """
    shards: list[tuple[int, Any]] = [
        (axis, placement)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    ]
    strided = [
        (axis, placement) for axis, placement in shards if getattr(placement, "split_factor", 1) > 1
    ]
    order = [*(shard for shard in shards if shard not in strided), *reversed(strided)]
    boxes = []
    for coordinates in product(*map(range, mesh_shape)):
        box = Box.whole(shape)
        for axis, placement in order:
            box = box.cut(placement.dim % len(shape), mesh_shape[axis], coordinates[axis])
        boxes.append(box)
    return tuple(boxes)


def spread_of_dtensor(x: DTensor, name: str) -> Spread:
    """Return the spread of a DTensor. Raises ValueError for placements other than Shard and
    Replicate."""
    for axis, placement in enumerate(x.placements):
        if not (
            placement.is_replicate() or placement.is_shard() or hasattr(placement, "split_factor")
        ):
            raise ValueError(
                f"{name} has placements {tuple(x.placements)}; a matrix is put together of shards "
                f"and copies, not of {placement}: "
                "give it after .redistribute(placements=...) with Shard or Replicate on every mesh "
                "axis"
            )
        if not _is_cut_by_later_axes(axis, x):
            raise ValueError(
                f"{name} has placements {tuple(x.placements)}, by which a rank has several pieces "
                "of it that do not follow each other, as of packed projections under tensor "
                "parallelism: give it with Shard or Replicate, or to another optimizer"
            )
    if x.device_mesh.get_coordinate() is None:
        ranks = x.device_mesh.mesh.flatten().tolist()
        raise ValueError(
            f"{name} is on a mesh of ranks {ranks}, to which this rank does not belong: give it on "
            "those ranks only"
        )
    spread = spread_on(x.device_mesh, tuple(x.shape), tuple(x.placements))
    shape = tuple(local(x).shape)
    if shape != spread.box.size:
        raise ValueError(
            f"{name} has shape {shape} here, but its placements {tuple(x.placements)} say "
            f"{spread.box.size}: make it with "
            "distribute_tensor, or DTensor.from_local with the shape of the whole tensor"
        )
    return spread


def _is_cut_by_later_axes(axis: int, x: DTensor) -> bool:
    """Whether the placement on an axis of the mesh, if it is a strided shard, is one of FSDP2's: it
    divides what later axes have cut before."""
    placement: Any = x.placements[axis]
    if not hasattr(placement, "split_factor"):
        return True
    sizes = x.device_mesh.shape[axis + 1 :]
    later = zip(sizes, x.placements[axis + 1 :], strict=True)
    cuts = [size for size, one in later if getattr(one, "dim", None) == placement.dim]
    return placement.split_factor == math.prod(cuts)


def spread_of_shard(
    x: Tensor, dim: int | None, group: dist.ProcessGroup | None, name: str
) -> Spread:
    """Return the spread of a plain tensor that is one of equal shards along `dim`, or a copy.
    Raises ValueError for an invalid dim or group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    if dim not in (0, 1, None) or isinstance(dim, bool) or (dim is not None and dim >= x.dim()):
        raise ValueError(
            f"partition_dim={dim!r} of {name} with shape {tuple(x.shape)} is not valid: give 0 or "
            "1, a dim of it, or None"
        )
    if group is None:
        raise ValueError(
            f"partition_dim={dim!r} of {name} needs tp_group=, the process group whose ranks hold "
            "the other shards"
        )
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        raise ValueError(
            f"tp_group has its ranks in the order {ranks}: make it with ascending ranks "
            "(new_group(sort_ranks=True))"
        )
    whole = tuple(n * len(ranks) if d == dim else n for d, n in enumerate(x.shape))
    return spread_on(
        DeviceMesh.from_group(group, x.device.type),
        whole,
        (Replicate() if dim is None else Shard(dim),),
    )


def spread_on(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_ranks: tuple[int, ...] = (),
) -> Spread:
    """Return the spread of a tensor of `shape` with these placements on `mesh`, to which this rank
    belongs. `mesh_ranks`: the ranks of the mesh in row-major order, if they are known."""
    mesh_ranks = mesh_ranks or tuple(mesh.mesh.flatten().tolist())
    box_of = dict(zip(mesh_ranks, boxes_of(shape, tuple(mesh.shape), placements), strict=True))
    ranks = tuple(sorted(box_of))
    return Spread(
        shape,
        ranks,
        tuple(box_of[rank] for rank in ranks),
        ranks.index(dist.get_rank()),
        mesh,
        placements,
        mesh_ranks,
    )
