"""The tensors of a checkpoint, read on demand from whichever ranks' files have them. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lather.checkpoint.table import STATE_FILE, StoredEntry, StoredFile, StoredPiece, Table, piece_name, read_table, remedy, sha256
from lather.errors import CheckpointError, ExchangeError
from lather.models.hf.safetensors_folder import DTYPES, Index, SafetensorsFolder, open_safetensors
from lather.optim.sharded.placement import Box


def open_checkpoint(path: Path) -> CheckpointTensors:
    """All tensors of a checkpoint, in one process. Raises CheckpointError if a file is missing or damaged."""
    table = read_table(path)
    tensors = CheckpointTensors(path, table)
    for file in table.files.values():
        tensors.check_file(file)
    return tensors


class CheckpointTensors:
    """The tensors of a checkpoint, read on demand, in one process."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder, self.table, self.tensors = folder, table, table.tensors
        self._files: dict[str, SafetensorsFolder] = {}

    def weights(self) -> CheckpointTensors:
        """Parameters and buffers alone."""
        return CheckpointTensors(self.folder, replace(self.table, tensors={n: e for n, e in self.tensors.items() if "/" not in n}))

    def read(self, name: str, index: Index = ()) -> Tensor:
        """`tensor[index]` on CPU; no more than that and a piece are in memory."""
        entry = self.tensors[name]
        box = _box_of(entry.shape, index)
        found = torch.empty(box.size, dtype=DTYPES[entry.dtype])
        self.read_into(found, name, box.offset)
        for dim in reversed([dim for dim, at in enumerate(index) if isinstance(at, int)]):
            found = found.select(dim, 0)
        return found

    @torch.no_grad()
    def read_into(self, target: Tensor, name: str, offset: Sequence[int]) -> None:
        """Copy the box of a tensor that begins at `offset` and is as large as `target` into it, one stored piece at a time."""
        entry, box = self.tensors[name], Box(tuple(offset), tuple(target.shape))
        for piece in entry.pieces:
            common = piece.box.overlap(box)
            if common is not None:
                target[common.within(box)].copy_(self._read_piece(name, entry, piece, common))

    def _read_piece(self, name: str, entry: StoredEntry, piece: StoredPiece, box: Box) -> Tensor:
        """A box of a tensor within a piece; of the piece's first dim as much is read as is asked for, of the others all."""
        index = box.within(piece.box)
        try:
            stored, key = self._find(name, entry, piece)
            value = stored.read(key, index[:1])
        except ExchangeError as error:
            raise self._damaged(piece.file, error) from None
        return value[(slice(None), *index[1:])] if index else value

    def check_file(self, file: StoredFile) -> None:
        """Raises CheckpointError unless it is as it was written, and holds the pieces that it should."""
        path = self.folder / file.name
        try:
            if path.stat().st_size != file.num_bytes or sha256(path) != file.sha256:
                raise ValueError(f"its size or checksum is not the one in {STATE_FILE}")
            for name, entry in self.tensors.items():
                for piece in entry.pieces:
                    if piece.file == file.name:
                        self._find(name, entry, piece)
        except (OSError, ValueError, ExchangeError) as error:
            raise self._damaged(file.name, error) from None

    def _find(self, name: str, entry: StoredEntry, piece: StoredPiece) -> tuple[SafetensorsFolder, str]:
        """The file of a piece and the piece's name in it."""
        if piece.file not in self._files:
            self._files[piece.file] = open_safetensors(self.folder / piece.file)
        stored, key = self._files[piece.file], piece_name(name, piece.box, entry.shape)
        found = stored.tensors.get(key)
        if found is None or (found.dtype, found.shape) != (entry.dtype, piece.box.size):
            raise ExchangeError(f"it does not hold {key!r} as {STATE_FILE} says")
        return stored, key

    def _damaged(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.folder / file}: missing or damaged ({error}): {remedy(self.folder)}")


def _box_of(shape: tuple[int, ...], index: Index) -> Box:
    """The box of `tensor[index]`, before dims that an int selects are dropped."""
    ranges = [range(size)[at] if isinstance(at, slice) else range(at, at + 1) for size, at in zip(shape, index, strict=False)]
    assert all(each.step == 1 for each in ranges), index
    ranges += [range(size) for size in shape[len(index) :]]
    return Box(tuple(each.start for each in ranges), tuple(len(each) for each in ranges))
