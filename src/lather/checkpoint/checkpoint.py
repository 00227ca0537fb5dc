"""Checkpoints: complete or absent, and of no particular mesh.

A checkpoint is a folder `checkpoints/step-00000100` with a file per rank that wrote, `rank-00000.safetensors`, and `state.json`, which says
where everything is (`checkpoint_table`). Torch's distributed checkpoint (DCP) plans who writes and who reads what, on whatever mesh; format
and planners are our own, so that nothing is pickled. The folder is written under another name, synced, then renamed, so a process killed at
any moment leaves the checkpoints that were there. Data order, learning rate and initial weights are functions of the seed and the step. A
run that starts from weights of elsewhere has a checkpoint of step 0, without optimizer state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lather.checkpoint.planner import Piece, PieceLoadPlanner, PieceSavePlanner, Stage
from lather.checkpoint.state import TrainingState, parameter_of, stored_shapes
from lather.checkpoint.storage import CheckpointTensors, FolderReader, FolderWriter, sha256
from lather.checkpoint.storage import Retention as Retention  # noqa: PLC0414
from lather.checkpoint.storage import list_checkpoints as list_checkpoints  # noqa: PLC0414
from lather.checkpoint.storage import step_of as step_of  # noqa: PLC0414
from lather.checkpoint.table import DTYPE_NAMES, STATE_FILE, StoredEntry, StoredFile, StoredPiece, Table, read_table
from lather.checkpoint.table import Progress as Progress  # noqa: PLC0414
from lather.errors import CheckpointError
from lather.models.hf.safetensors_folder import open_safetensors
from lather.parallel.launch.lifeline import COPY
from lather.parallel.shared_errors import of_first, together

ANOTHER = "use the configuration it was made with"
BIAS = ".e_score_correction_bias"
FIRST_FILE = "rank-00000.safetensors"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save_checkpoint(folder: Path, progress: Progress, state: TrainingState, *, retention: Retention, stage: Stage | None = None) -> Path:
    """Write `folder/step-<step>`; older checkpoints that are not to be kept go once it is in place. Returns its path.

    Every rank calls it and writes its own pieces, or what `stage` makes of them. On return the checkpoint is there for everybody. What one
    rank raises, all raise.
    """
    target = checkpoint_path(folder, progress.step)
    writer = FolderWriter(target, progress, None if state.optimizer is None else type(state.optimizer).__name__, retention=retention)
    group = state.saving_group
    exists = target.exists()  # complete, and the step fixes its contents
    if of_first(exists, group):
        return target
    pieces = (*state.weights(), *state.optimizer_state(), *state.random_state())
    try:
        _expect_one_process(group)
        save({}, storage_writer=writer, planner=PieceSavePlanner(pieces, stage), process_group=group, no_dist=group is None)
    except CheckpointException as collected:  # by all ranks, of which none writes any more
        with together(group):
            if state.rank == 0:
                writer.clear()
        raise writer.error or _raised(collected, state.rank) from None
    return target


def _expect_one_process(group: dist.ProcessGroup | None) -> None:
    if group is None:
        message = "torch.distributed is disabled, unavailable or uninitialized"
        warnings.filterwarnings("ignore", message=message, category=UserWarning)  # as it is meant to be


def _raised(collected: CheckpointException, own: int) -> BaseException:
    """DCP collects what ranks raise: a rank raises its own, or else that of the lowest rank that has one."""
    rank = min(collected.failures, key=lambda rank: (rank != own, rank))
    error = collected.failures[rank][0]
    if rank != own:
        error.add_note(COPY)
    return error


def write_first_checkpoint(folder: Path, write_weights: Callable[[Path], None]) -> Path:
    """Make `folder/step-00000000` of weights from elsewhere, which `write_weights` puts into the safetensors file that it is given, one
    entry per expert; returns its path.

    Any optimizer starts from it, with fresh state. It is not made in one go: the caller renames the folder around it.
    """
    target = checkpoint_path(folder, 0)
    target.mkdir(parents=True)
    file = target / FIRST_FILE
    write_weights(file)
    tensors = {
        name: StoredEntry(stored.dtype, stored.shape, (StoredPiece(file.name, (0,) * len(stored.shape), stored.shape),))
        for name, stored in open_safetensors(file).tensors.items()
    }
    files = {file.name: StoredFile(file.name, file.stat().st_size, sha256(file))}
    (target / STATE_FILE).write_text(Table(Progress(0, 0.0), None, files, tensors).to_json(), "utf-8")
    return target


def load_checkpoint(path: Path, state: TrainingState) -> Progress:
    """Load weights, and optimizer and random state if there is an optimizer, saved on whatever mesh.

    Every rank calls it; files are checked by all, one each in turn, and compared with the state before anything is changed. A rank's random
    state is loaded if there was such a rank.

    Raises CheckpointError, on all ranks, naming the file if one is missing or damaged, if names, shapes or dtypes of the weights are not
    the model's, or if the optimizer is of another class or its moments of other shapes.
    """
    table = _open(path, state, state.names())
    pieces = list(state.weights())
    if state.optimizer is not None and table.optimizer is not None:
        with together(state.group):
            _check_optimizer(path, table, state.optimizer)
        try:
            state.create_optimizer_state(table.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{path / STATE_FILE}: holds another optimizer's state ({error}): {ANOTHER}") from None
        pieces += [piece for piece in state.optimizer_state() if piece.name in table.tensors]
    random = [piece for piece in state.random_state() if _fits(piece, table.tensors.get(piece.name))]
    _load(path, table, state, [*pieces, *random])
    state.set_random_state(random)
    return table.progress


def load_parameters(path: Path, state: TrainingState) -> None:
    """Load another run's weights to start from. Balancing biases belong to the run that moved them and are not taken.

    Raises CheckpointError as `load_checkpoint` does.
    """
    names = {name for name in state.names() if not name.endswith(BIAS)}
    table = _open(path, state, names, passed_over=BIAS)
    _load(path, table, state, [piece for piece in state.weights() if piece.name in names])


def open_checkpoint(path: Path) -> CheckpointTensors:
    """All tensors of a checkpoint, in one process. Raises CheckpointError if a file is missing or damaged."""
    table = read_table(path)
    tensors = CheckpointTensors(path, table)
    for file in table.files.values():
        tensors.check_file(file)
    return tensors


def _load(path: Path, table: Table, state: TrainingState, pieces: Iterable[Piece]) -> None:
    reader, planner = FolderReader(path, table), PieceLoadPlanner(pieces)
    try:
        _expect_one_process(state.group)
        load({}, storage_reader=reader, planner=planner, process_group=state.group, no_dist=state.group is None)
    except CheckpointException as collected:
        raise _raised(collected, state.rank) from None


def _open(path: Path, state: TrainingState, names: set[str], passed_over: str | None = None) -> Table:
    """The table, when all files have been found as they were written and the weights to be those of all ranks, `names`."""
    with together(state.group):
        table = read_table(path)
    with together(state.group):
        tensors = CheckpointTensors(path, table)
        for file in list(table.files.values())[state.rank :: state.num_ranks]:
            tensors.check_file(file)
    with together(state.group):
        place = path / STATE_FILE
        found = {name for name in table.tensors if "/" not in name and not (passed_over and name.endswith(passed_over))}
        for name in sorted(names - found):
            raise CheckpointError(f"{place}: lacks {name!r}: {ANOTHER}")
        for name in sorted(found - names):
            raise CheckpointError(f"{place}: has a surplus {name!r}: {ANOTHER}")
        for piece in state.weights():
            if piece.name in names and not _fits(piece, table.tensors[piece.name]):
                stored = table.tensors[piece.name]
                there, here = f"{stored.shape} {stored.dtype}", f"{piece.shape} {DTYPE_NAMES.get(piece.value.dtype, piece.value.dtype)}"
                raise CheckpointError(f"{place}: {piece.name!r} is {there}, but the model's {here}: {ANOTHER}")
    return table


def _fits(piece: Piece, stored: StoredEntry | None) -> bool:
    return stored is not None and (stored.shape, stored.dtype) == (piece.shape, DTYPE_NAMES.get(piece.value.dtype))


def _check_optimizer(path: Path, table: Table, optimizer: object) -> None:
    """That its state is of such an optimizer and of this model."""
    file, given = path / STATE_FILE, type(optimizer).__name__
    if table.optimizer != given:
        raise CheckpointError(f"{file}: holds state of {table.optimizer}, not of {given}: {ANOTHER}")
    parameters = {parameter_of(name) for name in table.tensors if "/" not in name}
    for entry, keys in stored_shapes(table.tensors).items():
        if parameter_of(entry) not in parameters:
            raise CheckpointError(f"{file}: holds state of {entry!r}, which the model does not have: {ANOTHER}")
        for key, shape in keys.items():
            if parameter_of(entry) == entry not in table.tensors and hasattr(optimizer, "init_state"):
                continue  # whose matrix may be all experts side by side; its shapes are compared when the state is made
            if key in ("exp_avg", "exp_avg_sq") and (entry not in table.tensors or table.tensors[entry].shape != shape):
                raise CheckpointError(f"{file}: {entry}/{key} has shape {shape}, which is not the parameter's: {ANOTHER}")
