"""Loads a checkpoint, saved on any mesh: files are checked and compared with the run before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lather.checkpoint.folder import DTYPE_NAMES, STATE_FILE, Progress, StoredEntry, Table, read_table
from lather.checkpoint.reader import CheckpointTensors
from lather.checkpoint.state import TrainingState, stored_shapes
from lather.errors import CheckpointError
from lather.models.entry_names import split_entry
from lather.optim.sharded.placement import Piece
from lather.parallel.agreement import errors_on_all_ranks

ANOTHER = "use the configuration it was made with"
BIAS = ".e_score_correction_bias"


def load_checkpoint(path: Path, state: TrainingState) -> Progress:
    """Load weights and, if there is an optimizer, optimizer and random state, saved on any mesh.

    Every rank calls this. The ranks share the check of the files, and everything is compared with the state before anything is changed. A
    rank's random state is loaded if the checkpoint has one for this rank.

    Raises CheckpointError on all ranks, naming the file, if a file is missing or damaged, if names, shapes or dtypes of weights differ from
    the model's, or if the optimizer is of another class or its moments have other shapes.
    """
    tensors = _open(path, state)
    table, pieces = tensors.table, list(state.weights())
    if state.optimizer is not None and table.optimizer is not None:
        with errors_on_all_ranks(state.mesh.control_group):
            _check_optimizer(path, table, state.optimizer)
        try:
            state.create_optimizer_state(table.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{path / STATE_FILE}: holds another optimizer's state ({error}): {ANOTHER}") from None
        pieces += [piece for piece in state.optimizer_state() if piece.name in table.tensors]
    random = [piece for piece in state.random_state() if _fits(piece, table.tensors.get(piece.name))]
    _load(tensors, [*pieces, *random], state)
    state.set_random_state(random)
    return table.progress


def load_parameters(path: Path, state: TrainingState) -> None:
    """Load another run's weights as initial weights. Balancing biases are skipped, since they belong to the other run.

    Raises CheckpointError as `load_checkpoint` does.
    """
    _load(_open(path, state, without=(BIAS,)), [piece for piece in state.weights() if not piece.name.endswith(BIAS)], state)


def _load(tensors: CheckpointTensors, pieces: Iterable[Piece], state: TrainingState) -> None:
    """Fill this rank's pieces, one stored piece at a time."""
    with errors_on_all_ranks(state.mesh.control_group):
        for piece in pieces:
            tensors.read_into(piece.value, piece.name, piece.offset)


def _open(path: Path, state: TrainingState, without: tuple[str, ...] = ()) -> CheckpointTensors:
    """Check all files, and that the weights are those of all ranks, except names that end in one of `without`."""
    names = {name for name in state.names() if not name.endswith(without)}
    with errors_on_all_ranks(state.mesh.control_group):
        table = read_table(path)
    with errors_on_all_ranks(state.mesh.control_group):
        tensors = CheckpointTensors(path, table)
        for file in list(table.files.values())[state.mesh.rank :: state.mesh.size]:
            tensors.check_file(file)
    with errors_on_all_ranks(state.mesh.control_group):
        place = path / STATE_FILE
        found = {name for name in table.tensors if "/" not in name and not name.endswith(without)}
        for name in sorted(names - found):
            raise CheckpointError(f"{place}: lacks {name!r}: {ANOTHER}")
        for name in sorted(found - names):
            raise CheckpointError(f"{place}: has a surplus {name!r}: {ANOTHER}")
        for piece in state.weights():
            if piece.name in names and not _fits(piece, table.tensors[piece.name]):
                stored = table.tensors[piece.name]
                there, here = f"{stored.shape} {stored.dtype}", f"{piece.shape} {DTYPE_NAMES.get(piece.value.dtype, piece.value.dtype)}"
                raise CheckpointError(f"{place}: {piece.name!r} is {there}, but the model's {here}: {ANOTHER}")
    return tensors


def _fits(piece: Piece, stored: StoredEntry | None) -> bool:
    return stored is not None and (stored.shape, stored.dtype) == (piece.shape, DTYPE_NAMES.get(piece.value.dtype))


def _check_optimizer(path: Path, table: Table, optimizer: object) -> None:
    """Raise CheckpointError unless the stored state belongs to this class of optimizer and to this model."""
    file, given = path / STATE_FILE, type(optimizer).__name__
    if table.optimizer != given:
        raise CheckpointError(f"{file}: holds state of {table.optimizer}, not of {given}: {ANOTHER}")
    parameters = {split_entry(name)[0] for name in table.tensors if "/" not in name}
    for entry in stored_shapes(table.tensors):
        if split_entry(entry)[0] not in parameters:
            raise CheckpointError(f"{file}: holds state of {entry!r}, which the model does not have: {ANOTHER}")
