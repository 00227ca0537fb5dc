"""A piece of a tensor of the whole model on one rank, for saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lather.optim.sharded.placement import Box

Key = tuple[str, tuple[int, ...]]
"""Name of the tensor and offset of the piece, which together identify the piece."""

Stage = Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]
"""Replaces the tensors that this rank is to write by those that are written."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the whole model."""

    name: str
    """Name of the tensor."""
    value: Tensor
    """A view of the run's own tensor: copying into it loads the piece."""
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
        """Whether the piece has elements, or its tensor has none."""
        return self.value.numel() > 0 or tuple(self.value.shape) == self.shape
