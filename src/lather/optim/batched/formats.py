"""Formats: which tensors an entry of a rule's state is stored as, and how they become the entry.

    packed    of a factor, which is symmetric, one triangle is stored, as a rectangle
              (`lather.kernels.triangle`)
    int8      codes of 8 bits, `..._codes`, and a scale for each block of elements of the last dim,
              `..._scale` (`lather.kernels.quantized`)
    int16     of a factor, codes of 16 bits, `..._codes`, as pairs of bytes, because collectives
              have no int16, and the diagonal in fp32, `..._diagonal` (`lather.kernels.triangle`)
    others    one tensor, in the dtype of its kind, with the name of the entry

Codes have a name of their own, so that a loader that copies tensors by name, such as
torch.distributed.checkpoint, never takes codes for the numbers themselves.

The dtype of codes tells how they are decoded: uint8 holds second moments, which are not negative,
and pairs of bytes of factors; int8 everything else. Moments and factors are rounded stochastically,
so that averages do not drift; bases to the nearest code. An entry that has not changed is encoded
to the same bits.

Stored tensors are ordinary entries of a layout: buckets, checkpoints and exchanges between ranks
know no formats. Blocks lie along the last dim, so rows may be divided among ranks; codes of 16 bits
are encoded and decoded where all rows are. `Rows` gives a rule its entries, and stores what the
rule has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lather.boxes import Box, Piece
from lather.device import Read, is_true
from lather.kernels.quantized import (
    BASIS,
    BLOCK,
    POSITIVE,
    SIGNED,
    Code,
    dequantize,
    num_blocks,
    quantize_,
)
from lather.kernels.stochastic_rounding import round_to_bf16
from lather.kernels.triangle import (
    dequantize_triangle,
    pack_triangle,
    quantize_triangle,
    unpack_triangle,
)
from lather.optim.rule import Entry, State

CODES = (torch.int8, torch.uint8, torch.int16)
"""dtypes of codes."""

ENCODED = "_codes"
"""End of the name of the tensor with the codes of an entry."""

SCALE = "_scale"
"""End of the name of the tensor with the scales of an entry."""

DIAGONAL = "_diagonal"
"""End of the name of the tensor with the diagonal of a factor in int16."""

MIN_CODED = 4096
"""Least number of elements, of the last two dims together, of an entry that is stored as codes."""


def is_coded(shape: Sequence[int]) -> bool:
    """Whether entries of this shape are stored as codes if that is asked for; smaller ones stay
    fp32."""
    return len(shape) > 1 and math.prod(shape[-2:]) >= MIN_CODED


def check_finite(x: Tensor, what: str) -> None:
    """Raise ValueError if a saved entry, which is to be stored as codes, has an infinity or NaN:
    its block would be NaN."""
    if not is_true(x.isfinite().all(), Read.FINITE):
        raise ValueError(
            f"{what} has an infinity or NaN, but is to be stored in 8 or 16 bits (state_dtype "
            "int8), which has to be finite: load a state from before it, or begin with a fresh one"
        )


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
    is_scale: bool = False
    """Whether it has the scales of another entry, one per block, or its diagonal."""


@dataclass(frozen=True)
class EntryFormat:
    """The format of one entry."""

    name: str
    entry: Entry = field(repr=False)
    dtype: torch.dtype
    """dtype of the elements."""

    @classmethod
    def of(cls, name: str, entry: Entry, dtype: torch.dtype) -> EntryFormat:
        """Return the format for a `state_dtype`."""
        is_positive = dtype == torch.int8 and entry.nonnegative and entry.kind != "factor"
        return cls(name, entry, torch.uint8 if is_positive else dtype)

    def in_state(self, state: Mapping[str, object]) -> EntryFormat:
        """Return the format in which a state has the entry; this one if it lacks it."""
        return self.in_checkpoint(lambda key: getattr(state.get(key), "dtype", None)) or self

    def in_checkpoint(
        self, dtype_of: Callable[[str], torch.dtype | None], parent: str = ""
    ) -> EntryFormat | None:
        """Return the format in which a checkpoint has the entry, whose names there begin with
        `parent`; None if it lacks it. `dtype_of`: name -> dtype; None if there is no such
        tensor."""
        codes = dtype_of(f"{parent}{self.name}{ENCODED}")
        if codes == torch.uint8 and self.is_packed:
            codes = torch.int16
        dtype = codes if codes in CODES else dtype_of(f"{parent}{self.name}")
        return None if dtype is None else replace(self, dtype=dtype)

    @cached_property
    def key(self) -> str:
        """Name of the stored tensor with the elements."""
        return f"{self.name}{ENCODED}" if self.dtype in CODES else self.name

    @cached_property
    def is_packed(self) -> bool:
        """Whether one triangle of a symmetric matrix is stored."""
        return self.entry.kind == "factor"

    @cached_property
    def is_whole(self) -> bool:
        """Whether all rows are needed to encode or decode any."""
        return self.dtype == torch.int16

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether the stored tensor is the entry, in this dtype of computation."""
        return self.dtype == dtype and not self.is_packed

    @cached_property
    def stored(self) -> dict[str, StateEntry]:
        """The tensors that are stored, by name."""
        shape = packed_shape(self.entry.shape[-1]) if self.is_packed else self.entry.shape
        kind = self.entry.kind
        entry = StateEntry(shape, self.dtype, kind == "moment", kind == "basis")
        if self.dtype not in CODES:
            return {self.key: entry}
        scale = replace(
            entry,
            shape=(*shape[:-1], num_blocks(shape[-1])),
            dtype=torch.float32,
            is_moment=False,
            is_scale=True,
        )
        if self.is_whole:
            codes = replace(entry, shape=(*shape, 2), dtype=torch.uint8)
            diagonal = replace(scale, shape=self.entry.shape[-1:])
            return {self.key: codes, f"{self.name}{DIAGONAL}": diagonal}
        return {self.key: entry, f"{self.name}{SCALE}": scale}

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
        x, initial = stored[self.key], self.entry.initial
        is_stored = not self.is_packed and self.dtype not in CODES
        whole = x if is_stored else x.new_empty((1, *self.entry.shape), dtype=torch.float32)
        whole.fill_(initial or 0.0)
        if initial is None:
            whole.diagonal(dim1=-2, dim2=-1).fill_(1)
        if not is_stored:
            tensors = [(key, stored[key]) for key in self.stored]
            of_a_matrix = {key: y.new_empty((1, *y.shape[1:])) for key, y in tensors}
            self.encode(whole, of_a_matrix)
            for key, x in of_a_matrix.items():
                stored[key].copy_(x)

    def decode(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the entry in the dtype of computation: the stored tensor, if it is plain."""
        if self.is_whole:
            return dequantize_triangle(*self._triangle(stored)).to(dtype)
        x = stored[self.key] if self.dtype not in CODES else self.widened(stored)
        if not self.is_packed:
            return x.to(dtype)
        n = self.entry.shape[-1]
        whole = x.new_empty(*x.shape[:-2], n, n, dtype=dtype)
        return unpack_triangle(x.flatten(-2), n, out=whole)

    def encode(self, x: Tensor, stored: Mapping[str, Tensor], step: int | None = None) -> None:
        """Store the entry, given in any dtype. `step` is that of stochastic rounding; None rounds
        to the nearest, and codes of 16 bits as in step 0."""
        target = stored[self.key]
        if self.is_whole:
            quantize_triangle(x.float(), *self._triangle(stored), step or 0)
        elif self.is_packed and target.dtype == x.dtype and target.is_contiguous():
            pack_triangle(x, out=target.flatten(-2))  # without a copy
        else:
            self.narrow(pack(x) if self.is_packed else x, stored, step)

    def widened(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the stored elements, factors still packed, in a dtype of floats."""
        x = stored[self.key]
        if x.dtype not in CODES:
            return x
        return dequantize(x.view(torch.int8), stored[f"{self.name}{SCALE}"], code=self._code)

    def narrow(self, x: Tensor, stored: Mapping[str, Tensor], step: int | None = None) -> None:
        """Store elements, factors packed; rows of them, or all."""
        target, is_random = stored[self.key], step is not None and self.entry.kind != "basis"
        if target.dtype in CODES:
            codes, scales = target.view(torch.int8), stored[f"{self.name}{SCALE}"]
            quantize_(x.float(), codes, scales, step or 0, code=self._code, stochastic=is_random)
        elif is_random and self.is_packed and target.dtype == torch.bfloat16:
            round_to_bf16(x, step or 0, out=target)
        else:
            target.copy_(x)

    def read(
        self,
        pieces: Mapping[str, Piece],
        dtype_of: Callable[[str], torch.dtype | None],
        read_into: Callable[[Tensor, str, Sequence[int]], None],
    ) -> None:
        """Fill the pieces of the stored tensors, which have the same rows, from a checkpoint that
        may have the elements in another dtype, or not at all.

        Args:
            pieces: stored tensor -> the piece, with its name in the checkpoint.
            dtype_of: name in the checkpoint -> dtype; None if the checkpoint does not have it.
            read_into: fills a tensor from the offset of a tensor in the checkpoint.

        Raises ValueError if elements that become codes are not finite.
        """
        piece = pieces[self.key]
        parent = piece.name.removesuffix(self.key)
        theirs = self.in_checkpoint(dtype_of, parent)
        if theirs is None:
            return
        if theirs == self or not {theirs.dtype, self.dtype} & set(CODES):
            for key in self.stored:
                read_into(pieces[key].value, pieces[key].name, pieces[key].offset)
            return

        def read_stored(boxes: Mapping[str, Box]) -> dict[str, Tensor]:
            stored = {}
            for key, box in boxes.items():
                stored[key] = torch.empty(box.size, dtype=theirs.stored[key].dtype, device="cpu")
                read_into(stored[key], f"{parent}{key}", box.offset)
            return stored

        what = f"the saved entry {parent}{self.name}"
        if self.is_whole or theirs.is_whole:
            self._read_whole(pieces, theirs, read_stored, what)
            return
        size, offset, skipped = tuple(piece.value.shape), tuple(piece.offset), 0
        boxes = {theirs.key: Box(offset, size)}
        if theirs.dtype in CODES:
            skipped = offset[-1] % BLOCK  # elements before the piece in its first block
            size, offset = (*size[:-1], skipped + size[-1]), (*offset[:-1], offset[-1] - skipped)
            blocks = (*offset[:-1], offset[-1] // BLOCK), (*size[:-1], num_blocks(size[-1]))
            boxes = {theirs.key: Box(offset, size), f"{self.name}{SCALE}": Box(*blocks)}
        x = theirs.widened(read_stored(boxes))[..., skipped:]
        if self.dtype in CODES:
            check_finite(x, what)
        x = x.to(piece.value.device)
        self.narrow(x, {key: pieces[key].value for key in self.stored})

    def _read_whole(
        self,
        pieces: Mapping[str, Piece],
        theirs: EntryFormat,
        read_stored: Callable[[Mapping[str, Box]], dict[str, Tensor]],
        what: str,
    ) -> None:
        """Fill pieces from a whole entry, or one for each of their experts, in another format."""
        piece = pieces[self.key]
        batch = piece.value.dim() - len(self.stored[self.key].shape)
        lead, first = tuple(piece.value.shape[:batch]), tuple(piece.offset[:batch])

        def whole(shape: Sequence[int]) -> Box:
            return Box((*first, *(0 for _ in shape)), (*lead, *shape))

        stored = read_stored({key: whole(x.shape) for key, x in theirs.stored.items()})
        if self.dtype in CODES:
            check_finite(theirs.decode(stored, torch.float32), what)
        for key, x in self.converted(stored, theirs).items():
            rows = pieces[key].box.within(whole(x.shape[batch:]))
            pieces[key].value.copy_(x[rows])

    def converted(self, stored: Mapping[str, Tensor], theirs: EntryFormat) -> dict[str, Tensor]:
        """Return the stored tensors of a whole entry in this format from those in another."""
        x = theirs.decode(stored, torch.float32)
        lead = x.shape[: x.dim() - len(self.entry.shape)]
        result = {
            key: x.new_empty(*lead, *y.shape, dtype=y.dtype) for key, y in self.stored.items()
        }
        self.encode(x, result)
        return result

    def _triangle(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the codes of 16 bits, packed, and the diagonal; copies of codes that their owner
        has moved to an odd address."""
        codes = stored[self.key]
        codes = (codes.clone() if codes.storage_offset() % 2 else codes).view(torch.int16)
        return codes.view(*codes.shape[:-3], -1), stored[f"{self.name}{DIAGONAL}"]

    @property
    def _code(self) -> Code:
        if self.dtype == torch.uint8:
            return POSITIVE
        return BASIS if self.entry.kind == "basis" else SIGNED


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
        self._decoded: dict[str, tuple[Tensor, int]] = {}
        """For each of them, what the rule was given, and its version then."""

    def __missing__(self, name: str) -> Tensor:
        form = self._formats[name]
        stored = self._stored[name] = {key: self._stacks[key][self._index] for key in form.stored}
        x = self.data[name] = form.decode(stored, self._dtype)
        self._decoded[name] = x, 0 if torch.is_inference_mode_enabled() else x._version
        return x

    def __contains__(self, name: object) -> bool:
        return name in self._formats or name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def store(self, kinds: Sequence[str], step: int) -> None:
        """Store the entries of these kinds that were read, which kernels may have changed, and of
        all kinds those that the rule has replaced or torch has changed. `step`: t."""
        is_view = isinstance(self._index, slice)
        for name, x in list(self.data.items()):
            form = self._formats[name]
            if name not in self._stored:  # the rule has set it without reading it
                self.__missing__(name)
            stored, (decoded, version) = self._stored[name], self._decoded[name]
            if x is decoded:
                is_stored = is_view and x is stored.get(name)
                may_differ = form.entry.kind in kinds or torch.is_inference_mode_enabled()
                if is_stored or not (may_differ or x._version != version):
                    continue
            form.encode(x, stored, step)
            for key, part in stored.items() if not is_view else ():
                self._stacks[key][self._index] = part
