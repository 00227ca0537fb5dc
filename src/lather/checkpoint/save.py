"""Saves a checkpoint, which is complete or absent and does not depend on the mesh, at once or while
training continues.

Every rank has pieces of tensors of the whole model. Rank 0 assigns each piece to a rank that writes
it; each rank writes one safetensors file; rank 0 writes the table `state.json`
(`lather.checkpoint.folder`). Everything is written into a folder with a temporary name, synced, and
renamed by rank 0 when the files of all ranks are complete, so a process killed at any time leaves
the earlier checkpoints intact.

A piece that several ranks have (replicas, step counters) is written by the one with the fewest
bytes to write so far, so that the work is spread evenly. The assignment is always the same for the
same mesh.

While training continues, a thread runs all of `save_checkpoint`, including its planning. Training
waits only until this rank's pieces have been copied to CPU memory. One checkpoint is written at a
time, and the next one waits for it. This takes as much CPU memory as the rank writes, from the
first checkpoint to the end of the run; for CUDA it is pinned, so that copies run at the speed of
the bus. Of equal pieces on several ranks only one is copied. The thread has its own process group,
the mesh's `saving_group`.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import Box, Piece, PieceKey
from lather.checkpoint.folder import (
    Progress,
    Retention,
    StoredEntry,
    StoredFile,
    Table,
    check_cover,
    checkpoint_path,
    piece_name,
)
from lather.checkpoint.state import TrainingState
from lather.device import gpu_module, is_gpu
from lather.errors import CheckpointError
from lather.files import delete_folder, names_failing_disk, sha256, sync
from lather.parallel.agreement import broadcast, errors_on_all_ranks, gather, scatter
from lather.safetensors_file import DTYPE_NAMES, TensorToWrite, open_safetensors, write_safetensors

CPU = torch.device("cpu")

Values = Mapping[PieceKey, Tensor]
"""The tensors that a rank writes."""


class Saver:
    """Writes a run's checkpoints, immediately or in a thread. All ranks call the same methods in
    the same order."""

    def __init__(
        self, folder: Path, state: TrainingState, *, retention: Retention, asynchronous: bool
    ) -> None:
        self.folder, self.state, self.retention = folder, state, retention
        self.staging = Staging(state.mesh.device)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None
        self.longest = 0.0
        """Seconds that the longest checkpoint took to write; 0 if none was written."""

    def save(self, progress: Progress) -> Path:
        """Save a checkpoint and return its path, where a thread may still be writing it. Raises the
        error of the previous save if that failed."""
        self.wait()
        if self._thread is None:
            with self._timed():
                return save_checkpoint(self.folder, progress, self.state, retention=self.retention)
        device, copied = self.state.mesh.device, Event()
        if is_gpu(device):
            # the thread uses another stream
            gpu_module(device).current_stream(device).synchronize()
        self._writing = self._thread.submit(self._write, progress, self.retention, copied)
        copied.wait()
        return checkpoint_path(self.folder, progress.step)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raises its error on all ranks."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, progress: Progress, retention: Retention, copied: Event) -> None:
        def stage(values: Values) -> Values:
            staged = self.staging.copy(values)
            copied.set()
            return staged

        try:
            device = self.state.mesh.device
            if is_gpu(device):
                gpu_module(device).set_device(device)
            with self._timed():
                save_checkpoint(self.folder, progress, self.state, retention=retention, stage=stage)
        finally:
            copied.set()  # also if the save failed, or the checkpoint exists already

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - start)


class Staging:
    """CPU memory for copies of the tensors that a rank writes; it is reused for the next
    checkpoint."""

    def __init__(self, device: torch.device, host: torch.device = CPU) -> None:
        """`device`: device of the tensors; `host`: the CPU, or its stand-in in a dry run."""
        self.device, self.host = device, host
        self._copies: dict[PieceKey, Tensor] = {}

    @torch.no_grad()
    def copy(self, values: Values) -> Values:
        """Copy the tensors; the copies are complete on return."""
        self._copies = {key: self._room(key, value) for key, value in values.items()}
        for key, value in values.items():
            self._copies[key].copy_(value, non_blocking=True)
        if is_gpu(self.device):
            gpu_module(self.device).current_stream(self.device).synchronize()
        return self._copies

    def _room(self, key: PieceKey, value: Tensor) -> Tensor:
        copy = self._copies.get(key)
        if copy is not None and (copy.shape, copy.dtype) == (value.shape, value.dtype):
            return copy
        pinned = is_gpu(value)
        return torch.empty(value.shape, dtype=value.dtype, device=self.host, pin_memory=pinned)


def save_checkpoint(
    folder: Path,
    progress: Progress,
    state: TrainingState,
    *,
    retention: Retention,
    stage: Callable[[Values], Values] | None = None,
) -> Path:
    """Write `folder/step-<step>`, then delete older checkpoints that are not kept. Returns the path
    of the checkpoint.

    Every rank calls this and writes its own pieces, or the tensors by which `stage` replaces them.
    On return the checkpoint is complete on all ranks. If one rank raises, all ranks raise.
    """
    target, group = checkpoint_path(folder, progress.step), state.mesh.saving_group
    if broadcast(target.exists(), group):  # then it is complete, and its contents are the same
        return target
    writer, pieces = CheckpointWriter(target, group), state.pieces()
    try:
        files, tensors = writer.write(pieces, stage)
        with errors_on_all_ranks(group):
            if writer.rank == 0:
                optimizer = None if state.optimizer is None else type(state.optimizer).__name__
                writer.publish(Table(progress, optimizer, files, tensors), retention)
    except Exception:  # raised on all ranks, so none is still writing
        with errors_on_all_ranks(group):
            if writer.rank == 0 and writer.aside.exists():
                shutil.rmtree(writer.aside, ignore_errors=True)  # the disk may be full
        raise
    return target


class CheckpointWriter:
    """Writes the checkpoint `target` together with all ranks of a group (None: one process). Used
    for one save."""

    def __init__(self, target: Path, group: dist.ProcessGroup | None) -> None:
        self.target, self.group = target, group
        self.aside = target.with_name(f".tmp-{target.name}")
        self.rank = 0 if group is None else dist.get_rank(group)

    def write(
        self, pieces: Iterable[Piece], stage: Callable[[Values], Values] | None = None
    ) -> tuple[dict[str, StoredFile], dict[str, StoredEntry]]:
        """Write the files of all ranks; return on rank 0 the files, and the tensors in them."""
        mine = {piece.key: piece for piece in pieces if piece.is_stored}
        by_rank = gather([piece.described() for piece in mine.values()], self.group)
        assignment: list[list[Piece]] = []
        tensors: dict[str, StoredEntry] = {}
        with errors_on_all_ranks(self.group):
            if self.rank == 0:
                assignment = each_once(by_rank)
                tensors = stored_entries(assignment)
                self._make_folder()
        chosen = scatter(assignment, self.group)
        with errors_on_all_ranks(self.group):
            values: Values = {piece.key: mine[piece.key].value for piece in chosen}
            stored = self.write_file(chosen, values if stage is None else stage(values))
        return {file.name: file for file in gather(stored, self.group) if file is not None}, tensors

    def _make_folder(self) -> None:
        """Create the folder to write into, and delete what killed processes have left partly
        written or partly deleted."""
        for leftover in self.target.parent.glob(".tmp-*"):
            delete_folder(leftover)
        self.aside.mkdir(parents=True)
        sync(self.target.parent.parent)

    def write_file(
        self, chosen: Sequence[Piece], values: Mapping[PieceKey, Tensor]
    ) -> StoredFile | None:
        """Write this rank's file and sync it to disk; return None if the rank has nothing to
        write."""
        if not chosen:
            return None
        by_name = {piece_name(piece.name, piece.box, piece.shape): piece for piece in chosen}
        tensors = [
            TensorToWrite(name, piece.value.dtype, piece.box.size, [values[piece.key]])
            for name, piece in sorted(by_name.items())
        ]
        file, digest = self.aside / rank_file(self.rank), hashlib.sha256()
        with names_failing_disk(self.target.parent):
            write_safetensors(file, tensors, digest.update)
        return StoredFile(file.name, file.stat().st_size, digest.hexdigest())

    def publish(self, table: Table, retention: Retention) -> None:
        """Write the table, rename the folder, and delete older checkpoints; on rank 0, after all
        ranks have written."""
        folder = self.target.parent
        for stored in table.files.values():
            path = self.aside / stored.name
            if not path.is_file() or path.stat().st_size != stored.num_bytes:
                raise CheckpointError(
                    f"{path}: was written by another rank, but is not here: give a run_dir that "
                    "all ranks share"
                )
        with names_failing_disk(folder):
            table.write(self.aside)
        sync(self.aside)
        self.aside.rename(self.target)
        sync(folder)
        retention.delete_others(folder)


def each_once(by_rank: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Assign every piece to one rank that has it: the one with the fewest bytes assigned so far,
    largest pieces first."""
    havers: defaultdict[PieceKey, list[int]] = defaultdict(list)
    pieces: dict[PieceKey, Piece] = {}
    for rank, of_rank in enumerate(by_rank):
        for piece in of_rank:
            havers[piece.key].append(rank)
            first = pieces.setdefault(piece.key, piece)
            kinds = [(x.box, x.shape, x.value.dtype) for x in (first, piece)]
            assert kinds[0] == kinds[1], f"ranks differ in what {piece.name} is"
    load = [0] * len(by_rank)
    chosen: list[list[Piece]] = [[] for _ in by_rank]
    for piece in sorted(
        pieces.values(),
        key=lambda piece: (len(havers[piece.key]) > 1, -piece.value.nbytes, piece.key),
    ):
        rank = min(havers[piece.key], key=lambda rank: (load[rank], rank))
        load[rank] += piece.value.nbytes
        chosen[rank].append(piece)
    return chosen


def stored_entries(assignment: Sequence[Sequence[Piece]]) -> dict[str, StoredEntry]:
    """Return the table's entries for this assignment. Raises ValueError if the pieces do not cover
    a tensor."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    file_of: defaultdict[str, dict[Box, str]] = defaultdict(dict)
    for rank, of_rank in enumerate(assignment):
        for piece in of_rank:
            kind = DTYPE_NAMES[piece.value.dtype], piece.shape
            assert kinds.setdefault(piece.name, kind) == kind, piece.name
            file_of[piece.name][piece.box] = rank_file(rank)
    for name, (_, shape) in kinds.items():
        check_cover(name, shape, list(file_of[name]))
    return {name: StoredEntry(*kind, file_of[name]) for name, kind in kinds.items()}


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def write_first_checkpoint(folder: Path, write_weights: Callable[[Path], None]) -> None:
    """Create `folder/step-00000000` from weights that `write_weights` writes into the safetensors
    file that it is given, one entry per expert.

    Any optimizer can start from it with new state. It is not written atomically: the caller renames
    the folder that contains it."""
    target = checkpoint_path(folder, 0)
    target.mkdir(parents=True)
    file = target / rank_file(0)
    write_weights(file)
    tensors = {
        name: StoredEntry(stored.dtype, stored.shape, {Box.whole(stored.shape): file.name})
        for name, stored in open_safetensors(file).tensors.items()
    }
    files = {file.name: StoredFile(file.name, file.stat().st_size, sha256(file))}
    Table(Progress(0, 0.0), None, files, tensors).write(target)
