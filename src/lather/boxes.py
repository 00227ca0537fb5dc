"""Parts of tensors that ranks hold: boxes, chunks, pieces, and the local part of a DTensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: a range in every dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def cut(self, dim: int, num: int, number: int) -> Box:
        """Return chunk `number` of `num` along `dim`."""
        start, length = chunk(self.size[dim], num, number)
        offset = (*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1 :])
        return Box(offset, (*self.size[:dim], length, *self.size[dim + 1 :]))

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None if it is empty."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, size) if min(size, default=1) > 0 else None

    def within(self, outer: Box) -> Index:
        """Return the index of this box in a tensor that holds the box `outer`."""
        return tuple(
            slice(a - b, a - b + n)
            for a, b, n in zip(self.offset, outer.offset, self.size, strict=True)
        )


PieceKey = tuple[str, tuple[int, ...]]
"""Name of a tensor and offset of a piece, which together identify the piece."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor, and the values in it."""

    name: str
    """Name of the tensor: the key of an entry of optimizer state (`step`, `exp_avg`, `factor_0`,
    ...), or a name in a checkpoint."""
    value: Tensor
    """A view of this rank's own tensor: copying into it loads the piece."""
    offset: tuple[int, ...]
    """Offset of `value` in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.value.shape))

    @property
    def key(self) -> PieceKey:
        return self.name, self.offset

    def described(self) -> Piece:
        """Return the piece without its values (they are on the meta device), to be sent to other
        ranks."""
        return replace(self, value=self.value.to("meta"))

    @property
    def is_stored(self) -> bool:
        """Whether a checkpoint stores the piece: it has elements, or its tensor has none."""
        return self.value.numel() > 0 or tuple(self.value.shape) == self.shape


def chunk(length: int, num: int, number: int) -> tuple[int, int]:
    """Return start and length of chunk `number` of `num`, as in torch.chunk: sizes are rounded up,
    so that the last may be short or empty."""
    size = -(-length // num)
    start = min(number * size, length)
    return start, min(size, length - start)


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor. The class is not imported, which would take long: unless somebody
    has imported it, nothing is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of `x`, detached."""
    if not is_dtensor(x):
        return x.detach()
    with torch.no_grad():  # `x.detach()` first would cost a dispatch through DTensor
        return x.to_local()


def gradient_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype in which the gradient of a parameter accumulates: `p.grad_dtype` if that is
    set, else that of the parameter."""
    return (p.grad_dtype if p.is_leaf else None) or p.dtype


def local_grad(p: Tensor) -> Tensor:
    """Return this rank's part of the gradient; zeros if only other ranks have a gradient."""
    return torch.zeros_like(local(p), dtype=gradient_dtype(p)) if p.grad is None else local(p.grad)
