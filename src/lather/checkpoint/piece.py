"""A piece of a tensor of the whole model, as a rank has it: saved from and loaded into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lather.optim.sharded.placement import Box

Key = tuple[str, tuple[int, ...]]
"""Name of the tensor and offset of the piece, which tell a piece from all others."""

Stage = Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]
"""Is given what this rank is to write, and returns what is written in its place."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the whole model."""

    name: str
    """Name of the tensor."""
    value: Tensor
    """A view of what the run works with: copying into it loads it."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def key(self) -> Key:
        return self.name, self.offset

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.value.shape))

    @property
    def counts(self) -> bool:
        """Whether it has elements, or its tensor has none."""
        return self.value.numel() > 0 or tuple(self.value.shape) == self.shape
