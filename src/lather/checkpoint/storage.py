"""A checkpoint's folder, for torch's distributed checkpoints: every rank writes its pieces into a safetensors file of its own.

It reads from any rank's. Nothing is pickled.

Written under another name, synced, and renamed by rank 0 once all ranks' files are there, so that it is complete or absent.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lather.checkpoint.table import DTYPE_NAMES, STATE_FILE, Progress, StoredEntry, StoredFile, StoredPiece, Table, piece_name, remedy
from lather.errors import CheckpointError, ExchangeError
from lather.files import sync
from lather.models.hf.safetensors_folder import DTYPES, Index, SafetensorsFolder, TensorToWrite, open_safetensors, write_safetensors


@dataclass(frozen=True)
class Retention:
    """The checkpoints that are kept when a new one is in place."""

    last: int
    """So many of the newest, at least 1."""
    every: int = 0
    """Those of a multiple of so many steps; 0: none."""
    best: int | None = None
    """That of this step."""

    def dropped(self, folder: Path) -> list[Path]:
        """Return the checkpoints of the folder that are not kept."""
        older = list_checkpoints(folder)[: -self.last]
        return [path for path in older if step_of(path) != self.best and (not self.every or step_of(path) % self.every)]


class FolderWriter(StorageWriter):
    """Makes the checkpoint `target`. One save."""

    def __init__(self, target: Path, progress: Progress, optimizer: str | None, *, retention: Retention) -> None:
        self.target, self.progress, self.optimizer, self.retention = target, progress, optimizer, retention
        self.aside = target.with_name(f".tmp-{target.name}")
        self.error: BaseException | None = None
        """What this rank raised."""
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Rank 0 clears what killed processes have left, and makes the folder."""
        self._rank = int(kwargs.get("rank", 0))
        if is_coordinator:
            folder = self.target.parent
            for leftover in folder.glob(".tmp-*"):
                shutil.rmtree(leftover)
            self.aside.mkdir(parents=True)
            sync(folder.parent)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Returns when the rank's file is on disk."""
        done: Future[list[WriteResult]] = Future()
        try:
            done.set_result(self._write(plan, planner))
        except BaseException as error:
            self.error = error
            raise
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        pieces = {}
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            key = piece_name(item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size)
            pieces[key] = (item, TensorToWrite(key, data.properties.dtype, tuple(data.chunk.sizes)))

        def values(key: str) -> tuple[Tensor]:
            value = planner.resolve_data(pieces[key][0])
            assert isinstance(value, Tensor)
            return (value,)

        file, digest = self.aside / f"rank-{self._rank:05d}.safetensors", hashlib.sha256()
        try:
            write_safetensors(file, [pieces[key][1] for key in sorted(pieces)], values, digest)
        except OSError as error:
            raise _no_space(error, self.target.parent) from None
        stored = StoredFile(file.name, file.stat().st_size, digest.hexdigest())
        return [WriteResult(item.index, tensor.num_bytes, stored) for item, tensor in pieces.values()]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The table, the name, and older checkpoints go. On rank 0, when all have written."""
        try:
            self._publish(metadata, [result for own in results for result in own])
        except BaseException as error:
            self.error = error
            raise

    def _publish(self, metadata: Metadata, results: list[WriteResult]) -> None:
        folder = self.target.parent
        files = {result.storage_data.name: result.storage_data for result in results}
        for name, stored in files.items():
            path = self.aside / name
            if not path.is_file() or path.stat().st_size != stored.num_bytes:
                raise CheckpointError(f"{path}: was written by another rank, but is not here: give a run_dir that all ranks share")
        where = {result.index: result.storage_data.name for result in results}
        tensors = {name: _stored_entry(name, entry, where) for name, entry in metadata.state_dict_metadata.items()}
        try:
            text = Table(self.progress, self.optimizer, dict(sorted(files.items())), tensors).to_json()
            (self.aside / STATE_FILE).write_text(text, "utf-8")
            sync(self.aside / STATE_FILE)
        except OSError as error:
            raise _no_space(error, folder) from None
        sync(self.aside)
        self.aside.rename(self.target)
        sync(folder)
        for old in self.retention.dropped(folder):
            shutil.rmtree(old.rename(folder / f".tmp-old-{old.name}"))  # never half a checkpoint under a complete one's name

    def clear(self) -> None:
        """After an error, once no rank writes any more: a full disk is not to stay full."""
        if self.aside.exists():
            shutil.rmtree(self.aside, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir())


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


class FolderReader(StorageReader):
    """Reads pieces of a checkpoint whose table was read and whose files were checked against it."""

    def __init__(self, folder: Path, table: Table) -> None:
        self._tensors, self._metadata = CheckpointTensors(folder, table), table.metadata()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Returns when all is read, one piece at a time."""
        for item in plan.items:
            target = planner.resolve_tensor(item)
            assert item.storage_index.offset is not None
            target.copy_(self._tensors.read_piece(item.storage_index, tuple(item.storage_offsets), tuple(item.lengths)))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class CheckpointTensors:
    """The tensors of a checkpoint, read on demand, in one process."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder, self.table, self.tensors = folder, table, table.tensors
        self._files: dict[str, SafetensorsFolder] = {}
        self._pieces = {
            MetadataIndex(name, piece.offsets): (entry, piece) for name, entry in table.tensors.items() for piece in entry.pieces
        }

    def weights(self) -> CheckpointTensors:
        """Parameters and buffers alone."""
        return CheckpointTensors(self.folder, replace(self.table, tensors={n: e for n, e in self.tensors.items() if "/" not in n}))

    def read(self, name: str, index: Index = ()) -> Tensor:
        """`tensor[index]` on CPU; no more than that and a piece are in memory."""
        entry = self.tensors[name]
        start, stop = _box_of(entry.shape, index)
        box = torch.empty([b - a for a, b in zip(start, stop, strict=True)], dtype=DTYPES[entry.dtype])
        for piece in entry.pieces:
            low = [max(a, offset) for a, offset in zip(start, piece.offsets, strict=True)]
            high = [min(b, offset + size) for b, offset, size in zip(stop, piece.offsets, piece.sizes, strict=True)]
            sizes = tuple(b - a for a, b in zip(low, high, strict=True))
            if all(size > 0 for size in sizes):
                within = tuple(a - offset for a, offset in zip(low, piece.offsets, strict=True))
                target = box
                for dim, (a, first, size) in enumerate(zip(low, start, sizes, strict=True)):
                    target = target.narrow(dim, a - first, size)
                target.copy_(self.read_piece(MetadataIndex(name, piece.offsets), within, sizes))
        for dim in reversed([dim for dim, at in enumerate(index) if isinstance(at, int)]):
            box = box.select(dim, 0)
        return box

    def read_piece(self, index: MetadataIndex, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box within a piece; of its first dim as much is read as is asked for, of the others all."""
        entry, piece = self._pieces[index]
        try:
            stored, key = self._find(index.fqn, entry, piece)
            value = stored.read(key, (slice(offsets[0], offsets[0] + sizes[0]),) if sizes else ())
        except ExchangeError as error:
            raise self._damaged(piece.file, error) from None
        for dim in range(1, len(sizes)):
            value = value.narrow(dim, offsets[dim], sizes[dim])
        return value

    def check_file(self, file: StoredFile) -> None:
        """Raises CheckpointError unless it is as it was written, and holds the pieces that it should."""
        path = self.folder / file.name
        try:
            if path.stat().st_size != file.num_bytes or sha256(path) != file.sha256:
                raise ValueError(f"its size or checksum is not the one in {STATE_FILE}")
            for index, (entry, piece) in self._pieces.items():
                if piece.file == file.name:
                    self._find(index.fqn, entry, piece)
        except (OSError, ValueError, ExchangeError) as error:
            raise self._damaged(file.name, error) from None

    def _find(self, name: str, entry: StoredEntry, piece: StoredPiece) -> tuple[SafetensorsFolder, str]:
        """The file of a piece and the piece's name in it."""
        if piece.file not in self._files:
            self._files[piece.file] = open_safetensors(self.folder / piece.file)
        stored, key = self._files[piece.file], piece_name(name, piece.offsets, piece.sizes, entry.shape)
        found = stored.tensors.get(key)
        if found is None or (found.dtype, found.shape) != (entry.dtype, piece.sizes):
            raise ExchangeError(f"it does not hold {key!r} as {STATE_FILE} says")
        return stored, key

    def _damaged(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.folder / file}: missing or damaged ({error}): {remedy(self.folder)}")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _box_of(shape: tuple[int, ...], index: Index) -> tuple[list[int], list[int]]:
    """First and last plus one of each dim."""
    ranges = [range(size)[at] if isinstance(at, slice) else range(at, at + 1) for size, at in zip(shape, index, strict=False)]
    assert all(each.step == 1 for each in ranges), index
    ranges += [range(size) for size in shape[len(index) :]]
    return [each.start for each in ranges], [each.stop for each in ranges]


def _stored_entry(name: str, entry: object, where: dict[MetadataIndex, str]) -> StoredEntry:
    assert isinstance(entry, TensorStorageMetadata)
    pieces = tuple(
        StoredPiece(where[MetadataIndex(name, chunk.offsets)], tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
    )
    return StoredEntry(DTYPE_NAMES[entry.properties.dtype], tuple(entry.size), pieces)


def _no_space(error: OSError, folder: Path) -> OSError:
    """A full disk is told by the folder that the user knows."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) if error.errno == errno.ENOSPC else error
