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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lather.errors import CheckpointError
from lather.models.safetensors_folder import sync as sync  # noqa: PLC0414  (other modules know it from here)
from lather.parallel.together import together
from lather.train.state import Rows, Tensors, TrainingState

FORMAT = 1
ANOTHER = "use the configuration it was made with"
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

    Every rank calls it; rank 0 has the tensors of all and writes. On return the checkpoint is there for everybody.
    """
    target = folder / f"step-{progress.step:08d}"
    with together(state.num_ranks):
        exists = target.exists()  # complete, and the step fixes its contents
    if exists:
        return target
    tensors = state.gather()
    with together(state.num_ranks):
        if tensors is not None:
            optimizer = None if state.optimizer is None else type(state.optimizer).__name__
            _save(folder, target, progress, tensors, optimizer, keep_last)
    return target


def _save(folder: Path, target: Path, progress: Progress, tensors: tuple[Tensors, Tensors], optimizer: str | None, keep_last: int) -> None:
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    aside = folder / f".tmp-{target.name}"
    aside.mkdir(parents=True)
    sync(folder.parent)
    try:
        _write(aside, progress, tensors, optimizer)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk is not to stay full
        raise
    aside.rename(target)
    sync(folder)
    for old in list_checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old.rename(folder / f".tmp-old-{old.name}"))  # never half a checkpoint under a complete one's name


def _write(folder: Path, progress: Progress, tensors: tuple[Tensors, Tensors], optimizer: str | None) -> None:
    """All files of a checkpoint, on disk when this returns."""
    try:
        for name, contents in zip(FILES, tensors, strict=True):
            save_file(contents, folder / name)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
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
    save_file({}, target / FILES[1])
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
    """Load weights, and optimizer state if there is an optimizer, saved on whatever mesh. Files and state are compared before anything is
    changed.

    Raises CheckpointError naming the file if one is missing or damaged, if names, shapes or dtypes of the weights are not the model's, or
    if the optimizer is of another class or its moments of other shapes.
    """
    sealed = _read_state(path)
    weights = _read_tensors(path / FILES[0], sealed)
    _compare(path / FILES[0], weights, list(state.weights()), whole=state.num_ranks == 1)
    if state.optimizer is not None and sealed["optimizer"] is not None:
        if sealed["optimizer"] != type(state.optimizer).__name__:
            found, given = sealed["optimizer"], type(state.optimizer).__name__
            raise CheckpointError(f"{path / FILES[1]}: holds state of {found}, not of {given}: {ANOTHER}")
        _load_optimizer(path / FILES[1], _read_tensors(path / FILES[1], sealed), weights, state)
    state.load_weights(weights)
    return Progress(sealed["step"], sealed["seconds"], sealed["skipped_in_a_row"])


def load_parameters(path: Path, state: TrainingState) -> None:
    """Load another run's weights to start from. Balancing biases belong to the run that moved them and are not taken.

    Raises CheckpointError as `load_checkpoint` does.
    """
    weights = _read_tensors(path / FILES[0], _read_state(path))
    parameters = {name: value for name, value in weights.items() if not name.endswith(".e_score_correction_bias")}
    _compare(path / FILES[0], parameters, list(state.parameters()), whole=state.num_ranks == 1)
    state.load_weights(parameters)


def _load_optimizer(path: Path, entries: Tensors, weights: Tensors, state: TrainingState) -> None:
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, value in entries.items():
        name, _, key = full_name.rpartition("/")
        by_name.setdefault(name, {})[key] = value
        if name not in weights:
            raise CheckpointError(f"{path}: holds state of {name!r}, which the model does not have: {ANOTHER}")
        if key in ("exp_avg", "exp_avg_sq") and value.shape != weights[name].shape:
            raise CheckpointError(
                f"{path}: {full_name} has shape {tuple(value.shape)}, but the parameter {tuple(weights[name].shape)}: {ANOTHER}"
            )
    state.load_optimizer_state(by_name)


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


def _read_tensors(file: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    _check_file(file, state)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: missing or damaged ({error}): {_remedy(file.parent)}") from None


def _check_file(file: Path, state: dict[str, Any]) -> None:
    expected = state["files"].get(file.name, {})
    try:
        if file.stat().st_size != expected.get("bytes") or _sha256(file) != expected.get("sha256"):
            raise ValueError("its size or checksum is not the one in state.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: missing or damaged ({error}): {_remedy(file.parent)}") from None


def _compare(file: Path, found: Mapping[str, Tensor], expected: list[Rows], *, whole: bool) -> None:
    """A rank that has a part of the model expects some of the names."""
    rows = {own.name: own for own in expected}
    for name in sorted(rows.keys() - found.keys()):
        raise CheckpointError(f"{file}: lacks {name!r}: {ANOTHER}")
    for name in sorted(found.keys() - rows.keys()) if whole else ():
        raise CheckpointError(f"{file}: has a surplus {name!r}: {ANOTHER}")
    for name, own in rows.items():
        value = found[name]
        if tuple(value.shape) != own.shape or value.dtype != own.value.dtype:
            raise CheckpointError(
                f"{file}: {name!r} is {tuple(value.shape)} {value.dtype}, but the model's {own.shape} {own.value.dtype}: {ANOTHER}"
            )


def _remedy(path: Path) -> str:
    return f"delete {path} to go on from the checkpoint before it"


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
