"""Reads the tensors of a checkpoint on demand, from the files of all ranks. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lather.checkpoint.folder import STATE_FILE, StoredEntry, StoredFile, Table, piece_name, read_table, remedy
from lather.errors import CheckpointError, ExchangeError
from lather.files import sha256
from lather.models.hf.safetensors_folder import DTYPES, Index, SafetensorsFolder, open_safetensors
from lather.optim.sharded.placement import Box


def open_checkpoint(path: Path) -> CheckpointTensors:
    """Open all tensors of a checkpoint, in one process. Raises CheckpointError if a file is missing or damaged."""
    table = read_table(path)
    tensors = CheckpointTensors(path, table)
    for file in table.files.values():
        tensors.check_file(file)
    return tensors


class CheckpointTensors:
    """The tensors of a checkpoint, read on demand in one process."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder, self.table, self.tensors = folder, table, table.tensors
        self._files: dict[str, SafetensorsFolder] = {}

    def weights(self) -> CheckpointTensors:
        """Return only the parameters and buffers."""
        return CheckpointTensors(self.folder, replace(self.table, tensors={n: e for n, e in self.tensors.items() if "/" not in n}))

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return `tensor[index]` on the CPU; only this and one piece are in memory."""
        entry = self.tensors[name]
        box = _box_of(entry.shape, index)
        found = torch.empty(box.size, dtype=DTYPES[entry.dtype])
        self.read_into(found, name, box.offset)
        return found[tuple(0 if isinstance(at, int) else slice(None) for at in index)]

    @torch.no_grad()
    def read_into(self, target: Tensor, name: str, offset: Sequence[int]) -> None:
        """Copy the box of a tensor that starts at `offset` and has the shape of `target` into `target`, one stored box at a time.

        Only the requested rows of a stored box are read, and its other dims completely.
        """
        entry, box = self.tensors[name], Box(tuple(offset), tuple(target.shape))
        for stored_box, file in entry.file_of.items():
            common = stored_box.overlap(box)
            if common is None:
                continue
            index = common.within(stored_box)
            try:
                stored, key = self._find(name, entry, stored_box)
                rows = stored.read(key, index[:1])
            except ExchangeError as error:
                raise self._damaged(file, error) from None
            target[common.within(box)].copy_(rows[(slice(None), *index[1:])] if index else rows)

    def check_file(self, file: StoredFile) -> None:
        """Raise CheckpointError unless the file is unchanged since it was written and holds its pieces."""
        path = self.folder / file.name
        try:
            if path.stat().st_size != file.num_bytes or sha256(path) != file.sha256:
                raise ValueError(f"its size or checksum is not the one in {STATE_FILE}")
            for name, entry in self.tensors.items():
                for box, holder in entry.file_of.items():
                    if holder == file.name:
                        self._find(name, entry, box)
        except (OSError, ValueError, ExchangeError) as error:
            raise self._damaged(file.name, error) from None

    def _find(self, name: str, entry: StoredEntry, box: Box) -> tuple[SafetensorsFolder, str]:
        """Return the file of a stored box, and the box's name in it."""
        file = entry.file_of[box]
        if file not in self._files:
            self._files[file] = open_safetensors(self.folder / file)
        stored, key = self._files[file], piece_name(name, box, entry.shape)
        found = stored.tensors.get(key)
        if found is None or (found.dtype, found.shape) != (entry.dtype, box.size):
            raise ExchangeError(f"it does not hold {key!r} as {STATE_FILE} says")
        return stored, key

    def _damaged(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.folder / file}: missing or damaged ({error}): {remedy(self.folder)}")


def _box_of(shape: tuple[int, ...], index: Index) -> Box:
    """Return the box of `tensor[index]`, before dims selected by an int are dropped."""
    ranges = [range(size)[at] if isinstance(at, slice) else range(at, at + 1) for size, at in zip(shape, index, strict=False)]
    assert all(each.step == 1 for each in ranges), index
    ranges += [range(size) for size in shape[len(index) :]]
    return Box(tuple(each.start for each in ranges), tuple(len(each) for each in ranges))
