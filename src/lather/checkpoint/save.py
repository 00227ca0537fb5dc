"""Saves a checkpoint, which is complete or absent and does not depend on the mesh.

Every rank has pieces of tensors of the whole model. Rank 0 assigns each piece to a rank that writes it; each rank writes one safetensors
file; rank 0 writes the table `state.json` (`lather.checkpoint.table`). Everything is written into a folder with a temporary name, synced,
and renamed by rank 0 when the files of all ranks are complete, so a process killed at any time leaves the earlier checkpoints intact.

A piece that several ranks have (replicas, step counters) is written by the one with the fewest bytes to write so far, so that the work is
spread evenly. The assignment is always the same for the same mesh.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from lather.checkpoint.folder import Retention, aside_path, checkpoint_path, clear_leftovers
from lather.checkpoint.state import CopyTensors, TrainingState
from lather.checkpoint.table import (
    DTYPE_NAMES,
    STATE_FILE,
    Progress,
    StoredEntry,
    StoredFile,
    Table,
    check_cover,
    piece_name,
    sha256,
)
from lather.errors import CheckpointError
from lather.files import names_full_disk, sync
from lather.models.hf.safetensors_folder import TensorToWrite, open_safetensors, write_safetensors
from lather.optim.sharded.placement import Box, Piece, PieceKey
from lather.parallel.agreement import broadcast, errors_on_all_ranks, gather, scatter

FIRST_FILE = "rank-00000.safetensors"


def save_checkpoint(
    folder: Path, progress: Progress, state: TrainingState, *, retention: Retention, stage: CopyTensors | None = None
) -> Path:
    """Write `folder/step-<step>`, then delete older checkpoints that are not kept. Returns the path of the checkpoint.

    Every rank calls this and writes its own pieces, or the tensors by which `stage` replaces them. On return the checkpoint is complete on
    all ranks. If one rank raises, all ranks raise.
    """
    target = checkpoint_path(folder, progress.step)
    group = state.saving_group
    exists = target.exists()  # then it is complete, and its contents are the same
    if broadcast(exists, group):
        return target
    optimizer = None if state.optimizer is None else type(state.optimizer).__name__
    writer = CheckpointWriter(target, group)
    pieces = (*state.weights(), *state.optimizer_state(), *state.random_state())
    try:
        files, tensors = writer.write(pieces, stage)
        with errors_on_all_ranks(group):
            if writer.rank == 0:
                writer.publish(Table(progress, optimizer, files, tensors), retention)
    except Exception:  # raised on all ranks, so none is still writing
        with errors_on_all_ranks(group):
            if writer.rank == 0 and writer.aside.exists():
                shutil.rmtree(writer.aside, ignore_errors=True)  # the disk may be full
        raise
    return target


class CheckpointWriter:
    """Writes the checkpoint `target` together with all ranks of a group (None: one process). Used for one save."""

    def __init__(self, target: Path, group: dist.ProcessGroup | None) -> None:
        self.target, self.group = target, group
        self.aside = aside_path(target)
        self.rank = 0 if group is None else dist.get_rank(group)

    def write(self, pieces: Iterable[Piece], stage: CopyTensors | None = None) -> tuple[dict[str, StoredFile], dict[str, StoredEntry]]:
        """Write the files of all ranks; return on rank 0 the files, and the tensors in them."""
        mine = {piece.key: piece for piece in pieces if piece.counts}
        by_rank = gather([piece.described() for piece in mine.values()], self.group)
        plan: list[list[Piece]] = []
        with errors_on_all_ranks(self.group):
            if self.rank == 0:
                plan = self._prepare(by_rank)
        chosen = scatter(plan, self.group)
        with errors_on_all_ranks(self.group):
            values: Mapping[PieceKey, Tensor] = {one.key: mine[one.key].value for one in chosen}
            stored = self.write_file(chosen, values if stage is None else stage(values))
        files = {file.name: file for file in gather(stored, self.group) if file is not None}
        return files, stored_entries(plan)

    def _prepare(self, by_rank: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
        """Create the folder and assign the pieces to ranks; on rank 0."""
        plan = each_once(by_rank)
        stored_entries(plan)  # raises ValueError if a tensor is incomplete
        clear_leftovers(self.target.parent)
        self.aside.mkdir(parents=True)
        sync(self.target.parent.parent)
        return plan

    def write_file(self, chosen: Sequence[Piece], values: Mapping[PieceKey, Tensor]) -> StoredFile | None:
        """Write this rank's file and sync it to disk; return None if the rank has nothing to write."""
        if not chosen:
            return None
        by_name = {piece_name(one.name, one.box, one.shape): one for one in chosen}
        tensors = [TensorToWrite(name, one.value.dtype, one.box.size) for name, one in sorted(by_name.items())]
        file, digest = self.aside / rank_file(self.rank), hashlib.sha256()
        with names_full_disk(self.target.parent):
            write_safetensors(file, tensors, lambda name: (values[by_name[name].key],), digest)
        return StoredFile(file.name, file.stat().st_size, digest.hexdigest())

    def publish(self, table: Table, retention: Retention) -> None:
        """Write the table, rename the folder, and delete older checkpoints; on rank 0, after all ranks have written."""
        folder = self.target.parent
        for stored in table.files.values():
            path = self.aside / stored.name
            if not path.is_file() or path.stat().st_size != stored.num_bytes:
                raise CheckpointError(f"{path}: was written by another rank, but is not here: give a run_dir that all ranks share")
        with names_full_disk(folder):
            (self.aside / STATE_FILE).write_text(table.to_json(), "utf-8")
            sync(self.aside / STATE_FILE)
        sync(self.aside)
        self.aside.rename(self.target)
        sync(folder)
        retention.delete_others(folder)


def each_once(by_rank: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Assign every piece to one rank that has it: the one with the fewest bytes assigned so far, largest pieces first."""
    havers: defaultdict[PieceKey, list[int]] = defaultdict(list)
    pieces: dict[PieceKey, Piece] = {}
    for rank, own in enumerate(by_rank):
        for piece in own:
            havers[piece.key].append(rank)
            first = pieces.setdefault(piece.key, piece)
            assert first.is_like(piece), f"ranks differ in what {piece.name} is"
    load = [0] * len(by_rank)
    chosen: list[list[Piece]] = [[] for _ in by_rank]
    for piece in sorted(pieces.values(), key=lambda piece: (len(havers[piece.key]) > 1, -piece.value.nbytes, piece.key)):
        rank = min(havers[piece.key], key=lambda rank: (load[rank], rank))
        load[rank] += piece.value.nbytes
        chosen[rank].append(piece)
    return chosen


def stored_entries(plan: Sequence[Sequence[Piece]]) -> dict[str, StoredEntry]:
    """Return the table's entries for this assignment. Raises ValueError if the pieces do not cover a tensor."""
    found: defaultdict[str, list[tuple[Piece, int]]] = defaultdict(list)
    for rank, own in enumerate(plan):
        for piece in own:
            found[piece.name].append((piece, rank))
    entries = {}
    for name, pieces in found.items():
        (first, _), *_ = pieces
        assert all((one.shape, one.value.dtype) == (first.shape, first.value.dtype) for one, _ in pieces), name
        check_cover(name, first.shape, [one.box for one, _ in pieces])
        entries[name] = StoredEntry(DTYPE_NAMES[first.value.dtype], first.shape, {one.box: rank_file(rank) for one, rank in pieces})
    return entries


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def write_first_checkpoint(folder: Path, write_weights: Callable[[Path], None]) -> Path:
    """Create `folder/step-00000000` from weights that `write_weights` writes into the safetensors file that it is given, one entry per
    expert; return its path.

    Any optimizer can start from it with new state. It is not written atomically: the caller renames the folder that contains it.
    """
    target = checkpoint_path(folder, 0)
    target.mkdir(parents=True)
    file = target / FIRST_FILE
    write_weights(file)
    tensors = {
        name: StoredEntry(stored.dtype, stored.shape, {Box.whole(stored.shape): file.name})
        for name, stored in open_safetensors(file).tensors.items()
    }
    files = {file.name: StoredFile(file.name, file.stat().st_size, sha256(file))}
    (target / STATE_FILE).write_text(Table(Progress(0, 0.0), None, files, tensors).to_json(), "utf-8")
    return target
