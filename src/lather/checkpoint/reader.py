"""Reads a checkpoint, saved on any mesh: its tensors on demand, in one process, or as the state of
a run.

A state is loaded only after all files have been checked and compared with it. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lather.boxes import Box, Piece
from lather.checkpoint.folder import (
    AVERAGE,
    STATE_FILE,
    Progress,
    StoredEntry,
    StoredFile,
    Table,
    damaged,
    piece_name,
    read_table,
)
from lather.checkpoint.state import EntryPieces, TrainingState
from lather.errors import CheckpointError, ExchangeError
from lather.files import sha256
from lather.models.routing import CORRECTION_BIAS
from lather.optim.batched.formats import EntryFormat
from lather.optim.batched.remainders import REMAINDER, exact_weight, set_weight
from lather.parallel.agreement import errors_on_all_ranks
from lather.safetensors_file import DTYPE_NAMES, DTYPES, Index, SafetensorsFiles, open_safetensors

ANOTHER = "use the configuration it was made with"


def open_checkpoint(path: Path) -> CheckpointTensors:
    """Open all tensors of a checkpoint, in one process. Raises CheckpointError if a file is missing
    or damaged."""
    tensors = CheckpointTensors(path, read_table(path))
    for file in tensors.table.files.values():
        tensors.check_file(file)
    return tensors


class CheckpointTensors:
    """The tensors of a checkpoint, read on demand in one process."""

    def __init__(
        self, folder: Path, table: Table, *, of_weights: bool = False, averaged: bool = False
    ) -> None:
        """`of_weights`: only parameters and buffers; `averaged`: with the averages in the place of
        the parameters that have one."""
        self.folder, self.table, self._files = folder, table, dict[str, SafetensorsFiles]()
        self._stored_as = {
            name: f"{AVERAGE}{name}"
            for name in table.tensors
            if averaged and f"{AVERAGE}{name}" in table.tensors
        }
        halves = {name for name in table.tensors if f"{name}/{REMAINDER}" in table.tensors}
        self.tensors = {
            name: replace(entry, dtype="F32") if name in halves else entry
            for name in table.tensors
            if not (of_weights and "/" in name)
            for entry in [table.tensors[self._stored_as.get(name, name)]]
        }
        """The tensors by name. A weight in bf16 with a remainder is one in fp32."""

    def weights(self, *, averaged: bool = False) -> CheckpointTensors:
        """Return only the parameters and buffers; `averaged`: of trained parameters the averages.

        Raises CheckpointError if the checkpoint has no averages.
        """
        if averaged and not self.table.has_average:
            raise CheckpointError(
                f"{self.folder}: has no averaged weights, because its run had "
                "train.average_timescale = 0: train with one, such as 0.1, or take the raw weights"
            )
        return CheckpointTensors(self.folder, self.table, of_weights=True, averaged=averaged)

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return `tensor[index]` on the CPU; only this and one piece are in memory."""
        entry = self.tensors[name]
        box = _box_of(entry.shape, index)
        whole = torch.empty(box.size, dtype=DTYPES[entry.dtype], device="cpu")
        self.read_into(whole, name, box.offset)
        return whole[tuple(0 if isinstance(at, int) else slice(None) for at in index)]

    @torch.no_grad()
    def read_into(self, target: Tensor, name: str, offset: Sequence[int]) -> None:
        """Copy the box of a tensor that starts at `offset` and has the shape of `target` into
        `target`, one stored box at a time.

        Only the requested rows of a stored box are read, and its other dims completely.
        """
        name = self._stored_as.get(name, name)
        if (half := f"{name}/{REMAINDER}") not in self.table.tensors:
            self._read_stored(target, name, offset)
            return
        w = torch.empty(target.shape, dtype=torch.bfloat16, device="cpu")
        r = torch.empty((*target.shape, 2), dtype=torch.uint8, device="cpu")
        self._read_stored(w, name, offset)
        self._read_stored(r, half, (*offset, 0))
        target.copy_(exact_weight(w, {REMAINDER: r}))

    def _read_stored(self, target: Tensor, name: str, offset: Sequence[int]) -> None:
        """Do the same for a tensor as it is stored."""
        entry, box = self.table.tensors[name], Box(tuple(offset), tuple(target.shape))
        for stored_box, file in entry.file_of.items():
            common = stored_box.overlap(box)
            if common is None:
                continue
            index = common.within(stored_box)
            try:
                stored, key = self._find(name, entry, stored_box)
                rows = stored.read(key, index[:1])
            except ExchangeError as error:
                raise damaged(self.folder / file, error) from None
            target[common.within(box)].copy_(rows[(slice(None), *index[1:])] if index else rows)

    def check_file(self, file: StoredFile) -> None:
        """Raise CheckpointError unless the file is unchanged since it was written and holds its
        pieces."""
        path = self.folder / file.name
        try:
            if path.stat().st_size != file.num_bytes or sha256(path) != file.sha256:
                raise ValueError(f"its size or checksum is not the one in {STATE_FILE}")
            for name, entry in self.table.tensors.items():
                for box, holder in entry.file_of.items():
                    if holder == file.name:
                        self._find(name, entry, box)
        except (OSError, ValueError, ExchangeError) as error:
            raise damaged(path, error) from None

    def _find(self, name: str, entry: StoredEntry, box: Box) -> tuple[SafetensorsFiles, str]:
        """Return the file of a stored box, and the box's name in it."""
        file = entry.file_of[box]
        if file not in self._files:
            self._files[file] = open_safetensors(self.folder / file)
        stored, key = self._files[file], piece_name(name, box, entry.shape)
        header = stored.tensors.get(key)
        if header is None or (header.dtype, header.shape) != (entry.dtype, box.size):
            raise ExchangeError(f"it does not hold {key!r} as {STATE_FILE} says")
        return stored, key


def _box_of(shape: tuple[int, ...], index: Index) -> Box:
    """Return the box of `tensor[index]`, before dims selected by an int are dropped."""
    ranges = [
        range(size)[at] if isinstance(at, slice) else range(at, at + 1)
        for size, at in zip(shape, index, strict=False)
    ]
    assert all(each.step == 1 for each in ranges), index
    ranges += [range(size) for size in shape[len(index) :]]
    return Box(tuple(each.start for each in ranges), tuple(len(each) for each in ranges))


# --- the state of a run ---------------------------------------------------------------------------


def load_checkpoint(path: Path, state: TrainingState) -> Progress:
    """Load weights and, if there is an optimizer, optimizer and random state, saved on any mesh.
    An average of weights of which the checkpoint has none begins with the weights.

    Every rank calls this. The ranks share the check of the files, and everything is compared with
    the state before anything is changed. A rank's random state is loaded if the checkpoint has one
    for this rank.

    Raises CheckpointError on all ranks, naming the file, if a file is missing or damaged, if names,
    shapes or dtypes of weights differ from the model's, or if the optimizer is of another class or
    its moments have other shapes; and after weights have been loaded, if a part of its state that
    is not finite is to be stored in int8.
    """
    tensors, entries = _open(path, state), list[EntryPieces]()
    table, pieces = tensors.table, list(state.weights())
    if state.optimizer is not None and table.optimizer is not None:
        file, name = path / STATE_FILE, type(state.optimizer).__name__
        if table.optimizer != name:
            raise CheckpointError(
                f"{file}: holds state of {table.optimizer}, not of {name}: {ANOTHER}"
            )
        try:
            state.create_optimizer_state(table.tensors)
        except CheckpointError as error:
            raise CheckpointError(
                f"{file}: holds another optimizer's state ({error}): {ANOTHER}"
            ) from None
        entries = state.optimizer_entries()
    random = [
        piece for piece in state.random_state() if _fits(piece, table.tensors.get(piece.name))
    ]
    _load(tensors, [*pieces, *random], state)
    with errors_on_all_ranks(state.mesh.control_group):
        for formats, of_entry in entries:
            try:
                _read_entry(tensors, formats, of_entry)
            except CheckpointError:
                raise
            except ValueError as error:
                raise CheckpointError(f"{file}: {error}") from None
    state.set_random_state(random)
    if state.average is not None:
        state.average.restart()
        averages = [piece for piece in state.averages() if piece.name in table.tensors]
        _load(tensors, averages, state)
    return table.progress


def _read_entry(
    tensors: CheckpointTensors, formats: Mapping[str, EntryFormat], pieces: Mapping[str, Piece]
) -> None:
    """Fill the optimizer state of a parameter or an expert, in its formats, from those of the
    checkpoint."""
    stored = tensors.tensors

    def dtype_of(name: str) -> torch.dtype | None:
        return DTYPES[stored[name].dtype] if name in stored else None

    for form in formats.values():
        if form.key in pieces:
            form.read(pieces, dtype_of, tensors.read_into)
    of_formats = {key for form in formats.values() for key in form.stored}
    for key, piece in pieces.items():
        if key not in of_formats and key != REMAINDER and piece.name in stored:
            tensors.read_into(piece.value, piece.name, piece.offset)


def load_parameters(path: Path, state: TrainingState, *, averaged: bool = False) -> None:
    """Load another run's weights, or its averaged weights, as initial weights. The correction bias
    of a router that only one of the two runs has is left out.

    Raises CheckpointError as `load_checkpoint` does, and if there are no averaged weights.
    """
    tensors = _open(path, state, without=(CORRECTION_BIAS,)).weights(averaged=averaged)
    pieces = [
        piece
        for piece in state.weights()
        if piece.name in tensors.tensors or not piece.name.endswith(CORRECTION_BIAS)
    ]
    _load(tensors, pieces, state)


def _load(tensors: CheckpointTensors, pieces: Iterable[Piece], state: TrainingState) -> None:
    """Fill this rank's pieces, one stored piece at a time. Weights get their remainders from the
    weights."""
    remainders = state.remainders()
    with errors_on_all_ranks(state.mesh.control_group):
        for piece in pieces:
            r = remainders.get(piece.key)
            if r is None:
                tensors.read_into(piece.value, piece.name, piece.offset)
            else:
                x = torch.empty(piece.value.shape, device="cpu")
                tensors.read_into(x, piece.name, piece.offset)
                set_weight(piece.value, x.to(r.device), {REMAINDER: r})


def _open(path: Path, state: TrainingState, without: tuple[str, ...] = ()) -> CheckpointTensors:
    """Check all files, and that the weights are those of all ranks, except names that end in one of
    `without`."""
    names = {name for name in state.names() if not name.endswith(without)}
    with errors_on_all_ranks(state.mesh.control_group):
        table = read_table(path)
        tensors = CheckpointTensors(path, table)
        for file in list(table.files.values())[state.mesh.rank :: state.mesh.size]:
            tensors.check_file(file)
    with errors_on_all_ranks(state.mesh.control_group):
        place = path / STATE_FILE
        stored = {name for name in table.tensors if "/" not in name and not name.endswith(without)}
        for name in sorted(names - stored):
            raise CheckpointError(f"{place}: lacks {name!r}: {ANOTHER}")
        for name in sorted(stored - names):
            raise CheckpointError(f"{place}: has a surplus {name!r}: {ANOTHER}")
        for piece in state.weights():
            entry = table.tensors.get(piece.name)
            if piece.name in names and not _fits(piece, entry, of_weight=True):
                assert entry is not None
                dtype = DTYPE_NAMES.get(piece.value.dtype, piece.value.dtype)
                raise CheckpointError(
                    f"{place}: {piece.name!r} is {entry.shape} {entry.dtype}, but the model's "
                    f"{piece.shape} {dtype}: {ANOTHER}"
                )
    return tensors


def _fits(piece: Piece, stored: StoredEntry | None, *, of_weight: bool = False) -> bool:
    """Whether a piece is one of a stored tensor. A weight may change between fp32 and bf16."""
    if stored is None or stored.shape != piece.shape:
        return False
    dtypes = {stored.dtype, DTYPE_NAMES.get(piece.value.dtype)}
    return len(dtypes) == 1 or (of_weight and dtypes == {"F32", "BF16"})
