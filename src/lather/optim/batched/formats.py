"""Formats: which tensors an entry of a rule's state is stored as, and how they become the entry.

    plain    one tensor, in the dtype of its kind
    packed   a factor, which is symmetric: one of its triangles, in a rectangle
             (`lather.kernels.triangle`)

Stored tensors are ordinary entries of a layout: buckets, checkpoints and exchanges between ranks
know no formats. `Rows` gives a rule its entries, and stores what the rule has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lather.kernels.triangle import pack_triangle, unpack_triangle
from lather.optim.rule import Entry, State


def packed_shape(n: int) -> tuple[int, int]:
    """Return rows and columns of the rectangle of an n x n factor. Its rows may be divided among
    ranks like those of any matrix."""
    return n + 1 - n % 2, (n + 1) // 2


def pack(x: Tensor) -> Tensor:
    """Return the rectangles of whole factors."""
    n = x.shape[-1]
    return pack_triangle(x).view(*x.shape[:-2], *packed_shape(n))


@dataclass(frozen=True)
class StateEntry:
    """One tensor of the optimizer state of a matrix, as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_moment: bool
    """Whether the tensor has the shape of the matrix."""
    is_basis: bool
    """Whether refreshes alone change it."""


@dataclass(frozen=True)
class EntryFormat:
    """The format of one entry."""

    name: str
    entry: Entry = field(repr=False)
    dtype: torch.dtype
    """dtype in which the elements are stored."""

    @cached_property
    def is_packed(self) -> bool:
        """Whether one triangle of a symmetric matrix is stored."""
        return self.entry.kind == "factor"

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether the stored tensor is the entry, in this dtype of computation."""
        return self.dtype == dtype and not self.is_packed

    @cached_property
    def stored(self) -> dict[str, StateEntry]:
        """The tensors that are stored, by name."""
        shape = packed_shape(self.entry.shape[-1]) if self.is_packed else self.entry.shape
        kind = self.entry.kind
        return {self.name: StateEntry(shape, self.dtype, kind == "moment", kind == "basis")}

    def allocate(self, batch: int, device: torch.device) -> dict[str, Tensor]:
        """Return the stored tensors of a batch with the initial value."""
        stored = {
            key: torch.empty(batch, *x.shape, dtype=x.dtype, device=device)
            for key, x in self.stored.items()
        }
        self.initialize(stored)
        return stored

    def initialize(self, stored: Mapping[str, Tensor]) -> None:
        """Give the stored tensors of a batch the initial value."""
        x, initial = stored[self.name], self.entry.initial
        whole = x.new_empty(self.entry.shape) if self.is_packed else x
        whole.fill_(initial or 0.0)
        if initial is None:
            whole.diagonal(dim1=-2, dim2=-1).fill_(1)
        if self.is_packed:
            x.copy_(pack(whole))

    def decode(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the entry in the dtype of computation: the stored tensor, if it is plain."""
        x = stored[self.name]
        if not self.is_packed:
            return x.to(dtype)
        n = self.entry.shape[-1]
        whole = x.new_empty(*x.shape[:-2], n, n, dtype=dtype)
        return unpack_triangle(x.flatten(-2), n, out=whole)

    def encode(self, x: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Store the entry, given in any dtype."""
        target = stored[self.name]
        if self.is_packed:
            pack_triangle(x, out=target.flatten(-2))
        else:
            target.copy_(x)


Formats = Mapping[str, EntryFormat]
"""Formats of the entries of a rule's state by name."""


class Rows(State):
    """The state of rows of a bucket in the dtype of computation; an entry is decoded when the rule
    first reads it."""

    def __init__(
        self,
        formats: Formats,
        stacks: Mapping[str, Tensor],
        index: slice | Tensor,
        dtype: torch.dtype,
    ) -> None:
        """`index`: the rows; a slice, or their numbers, which are then gathered."""
        super().__init__()
        self._formats, self._stacks, self._index, self._dtype = formats, stacks, index, dtype
        self._stored: dict[str, dict[str, Tensor]] = {}
        """For each entry that was read, the rows of its stored tensors."""
        self._decoded: dict[str, Tensor] = {}

    def __missing__(self, name: str) -> Tensor:
        form = self._formats[name]
        stored = self._stored[name] = {key: self._stacks[key][self._index] for key in form.stored}
        self.data[name] = self._decoded[name] = form.decode(stored, self._dtype)
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in self._formats or name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def store(self, kinds: Sequence[str]) -> None:
        """Store the entries of these kinds that were read, and those that the rule has replaced."""
        is_view = isinstance(self._index, slice)
        for name, x in list(self.data.items()):
            form = self._formats[name]
            if name not in self._stored:  # the rule has set it without reading it
                self.__missing__(name)
            stored, is_same = self._stored[name], x is self._decoded[name]
            if is_same and (form.entry.kind not in kinds or (is_view and x is stored[name])):
                continue
            form.encode(x, stored)
            for key, part in stored.items() if not is_view else ():
                self._stacks[key][self._index] = part
