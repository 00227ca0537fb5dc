"""Checkpoints: complete or absent.

A checkpoint is a folder `checkpoints/step-00000100` with `model.safetensors`, `optimizer.safetensors` (one entry per parameter and state
key, `layers.0.self_attn.o_proj.weight/exp_avg`) and `state.json` (step, seconds trained, checksums of all three). It is written under
another name, synced to disk, then renamed, so a process killed at any moment leaves the checkpoints that were there. Nothing is
pickled. Data order and initial weights are functions of the seed and the step, so no random state needs saving. A run that starts from
weights of elsewhere has a checkpoint of step 0, without optimizer state.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lather.errors import CheckpointError, ExchangeError
from lather.models.safetensors_folder import DTYPES, SafetensorsFolder, open_safetensors, write_safetensors
from lather.models.safetensors_folder import sync as sync  # noqa: PLC0414  (other modules know it from here)
from lather.parallel.together import of_first, together
from lather.train.state import Gathering, Rows, TrainingState

FORMAT = 1
ANOTHER = "use the configuration it was made with"
BIAS = ".e_score_correction_bias"
FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Progress:
    """How far the run is, besides weights and optimizer state."""

    step: int
    """Optimizer steps done."""
    seconds: float
    """Time spent training, over all processes that worked on the run."""
    skipped_in_a_row: int = 0
    """Steps skipped just before this one for a loss or gradient that was not finite."""


def save_checkpoint(folder: Path, progress: Progress, state: TrainingState, *, keep_last: int) -> Path:
    """Write `folder/step-<step>`; older checkpoints beyond `keep_last` go once it is in place. Returns its path.

    Every rank calls it; rank 0 writes what all send it, piece by piece. On return the checkpoint is there for everybody.
    """
    target = folder / f"step-{progress.step:08d}"
    with together(state.group):
        exists = target.exists()  # complete, and the step fixes its contents
    if of_first(exists, state.group):
        return target
    gathering = Gathering((state.weights(), state.optimizer_state()), state.group)
    error: Exception | None = None
    if state.is_first:
        optimizer = None if state.optimizer is None else type(state.optimizer).__name__
        try:
            _save(folder, target, progress, gathering, optimizer, keep_last)
        except Exception as own:
            error = own
        gathering.finish()
    else:
        gathering.send()
    with together(state.group):  # not around the sending, in which ranks wait for each other
        if error is not None:
            raise error
    return target


def _save(folder: Path, target: Path, progress: Progress, gathering: Gathering, optimizer: str | None, keep_last: int) -> None:
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    aside = folder / f".tmp-{target.name}"
    aside.mkdir(parents=True)
    sync(folder.parent)
    try:
        _write(aside, progress, gathering, optimizer)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk is not to stay full
        raise
    aside.rename(target)
    sync(folder)
    for old in list_checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old.rename(folder / f".tmp-old-{old.name}"))  # never half a checkpoint under a complete one's name


def _write(folder: Path, progress: Progress, gathering: Gathering, optimizer: str | None) -> None:
    """All files of a checkpoint, on disk when this returns."""
    for number, name in enumerate(FILES):
        try:
            write_safetensors(folder / name, gathering.tensors(number), partial(gathering.pieces, number))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
            raise
    _seal(folder, progress, optimizer)


def write_first_checkpoint(folder: Path, write_weights: Callable[[Path], None]) -> Path:
    """Make `folder/step-00000000` of weights from elsewhere, which `write_weights` puts into the file that it is given; returns its path.

    Any optimizer starts from it, with fresh state. It is not made in one go: the caller renames the folder around it.
    """
    target = folder / f"step-{0:08d}"
    target.mkdir(parents=True)
    write_weights(target / FILES[0])
    write_safetensors(target / FILES[1], (), lambda name: ())
    _seal(target, Progress(0, 0.0), None)
    return target


def _seal(folder: Path, progress: Progress, optimizer: str | None) -> None:
    """Write `state.json` for the files that are there and sync everything."""
    state = {
        "format": FORMAT,
        "step": progress.step,
        "seconds": progress.seconds,
        "skipped_in_a_row": progress.skipped_in_a_row,
        "optimizer": optimizer,
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in FILES},
    }
    (folder / "state.json").write_text(json.dumps({**state, "digest": _digest(state)}, indent=1))
    for path in (*folder.iterdir(), folder):
        sync(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir())


def load_checkpoint(path: Path, state: TrainingState) -> Progress:
    """Load weights, and optimizer state if there is an optimizer, saved on whatever mesh.

    Every rank calls it; rank 0 checks the files, and each reads its own part. Files and state are compared before anything is changed.

    Raises CheckpointError, on all ranks, naming the file if one is missing or damaged, if names, shapes or dtypes of the weights are not
    the model's, or if the optimizer is of another class or its moments of other shapes.
    """
    sealed, weights = _open_weights(path, state, state.names())
    if state.optimizer is not None and sealed["optimizer"] is not None:
        with together(state.group):
            if sealed["optimizer"] != type(state.optimizer).__name__:
                found, given = sealed["optimizer"], type(state.optimizer).__name__
                raise CheckpointError(f"{path / FILES[1]}: holds state of {found}, not of {given}: {ANOTHER}")
            if state.is_first:
                _check_file(path / FILES[1], sealed)
        with together(state.group):
            entries = _open(path / FILES[1])
            shapes = _state_shapes(path / FILES[1], entries, weights)
        with together(state.group):
            state.load_optimizer_state(shapes, entries.read)
    with together(state.group):
        state.load_weights(weights.tensors, weights.read)
    return Progress(sealed["step"], sealed["seconds"], sealed["skipped_in_a_row"])


def load_parameters(path: Path, state: TrainingState) -> None:
    """Load another run's weights to start from. Balancing biases belong to the run that moved them and are not taken.

    Raises CheckpointError as `load_checkpoint` does.
    """
    names = {name for name in state.names() if not name.endswith(BIAS)}
    _, weights = _open_weights(path, state, names, passed_over=BIAS)
    with together(state.group):
        state.load_weights(names, weights.read)


def _open_weights(
    path: Path, state: TrainingState, names: set[str], passed_over: str | None = None
) -> tuple[dict[str, Any], SafetensorsFolder]:
    """`state.json`, and the weights once they have been compared with those of all ranks, `names`."""
    with together(state.group):
        sealed = _read_state(path)
        if state.is_first:
            _check_file(path / FILES[0], sealed)
    with together(state.group):
        weights = _open(path / FILES[0])
        found = {name for name in weights.tensors if passed_over is None or not name.endswith(passed_over)}
        for name in sorted(names - found):
            raise CheckpointError(f"{path / FILES[0]}: lacks {name!r}: {ANOTHER}")
        for name in sorted(found - names):
            raise CheckpointError(f"{path / FILES[0]}: has a surplus {name!r}: {ANOTHER}")
        _compare(path / FILES[0], weights, (rows for rows in state.weights() if rows.name in names))
    return sealed, weights


def _state_shapes(path: Path, entries: SafetensorsFolder, weights: SafetensorsFolder) -> dict[str, dict[str, tuple[int, ...]]]:
    """By parameter and key, checked against the parameters."""
    by_name: dict[str, dict[str, tuple[int, ...]]] = {}
    for full_name, entry in entries.tensors.items():
        name, _, key = full_name.rpartition("/")
        by_name.setdefault(name, {})[key] = entry.shape
        if name not in weights.tensors:
            raise CheckpointError(f"{path}: holds state of {name!r}, which the model does not have: {ANOTHER}")
        shape = weights.tensors[name].shape
        if key in ("exp_avg", "exp_avg_sq") and entry.shape != shape:
            raise CheckpointError(f"{path}: {full_name} has shape {entry.shape}, but the parameter {shape}: {ANOTHER}")
    return by_name


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "state.json"
    try:
        state = json.loads(file.read_text())
        if not isinstance(state, dict):
            raise ValueError("not a table")
        if state.pop("digest") != _digest(state):
            raise ValueError("its digest is not that of its contents")
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, expected {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: missing or damaged ({error}): {_remedy(path)}") from None
    return dict(state)


def checked_weights(path: Path) -> Path:
    """The file with a checkpoint's weights; raises CheckpointError if it is missing or damaged."""
    _check_file(path / FILES[0], _read_state(path))
    return path / FILES[0]


def _open(file: Path) -> SafetensorsFolder:
    try:
        return open_safetensors(file)
    except ExchangeError as error:
        raise CheckpointError(f"{file}: missing or damaged ({error}): {_remedy(file.parent)}") from None


def _check_file(file: Path, state: dict[str, Any]) -> None:
    expected = state["files"].get(file.name, {})
    try:
        if file.stat().st_size != expected.get("bytes") or _sha256(file) != expected.get("sha256"):
            raise ValueError("its size or checksum is not the one in state.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: missing or damaged ({error}): {_remedy(file.parent)}") from None


def _compare(file: Path, found: SafetensorsFolder, expected: Iterable[Rows]) -> None:
    for own in expected:
        stored = found.tensors[own.name]
        dtype = DTYPES.get(stored.dtype, stored.dtype)
        if stored.shape != own.shape or dtype != own.value.dtype:
            raise CheckpointError(
                f"{file}: {own.name!r} is {stored.shape} {dtype}, but the model's {own.shape} {own.value.dtype}: {ANOTHER}"
            )


def _remedy(path: Path) -> str:
    return f"delete {path} to go on from the checkpoint before it"


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
