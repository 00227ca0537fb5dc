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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lather.errors import CheckpointError
from lather.models.safetensors_folder import sync as sync  # noqa: PLC0414  (other modules know it from here)

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


def save_checkpoint(folder: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep_last: int) -> Path:
    """Write `folder/step-<step>`; older checkpoints beyond `keep_last` go once it is in place. Returns its path."""
    target = folder / f"step-{progress.step:08d}"
    if target.exists():  # complete, and the step fixes its contents
        return target
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    aside = folder / f".tmp-{target.name}"
    aside.mkdir(parents=True)
    sync(folder.parent)
    try:
        _write(aside, progress, model, optimizer)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk is not to stay full
        raise
    aside.rename(target)
    sync(folder)
    for old in list_checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old.rename(folder / f".tmp-old-{old.name}"))  # never half a checkpoint under a complete one's name
    return target


def _write(folder: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All files of a checkpoint, on disk when this returns."""
    try:
        save_file(model_tensors(model), folder / FILES[0])
        save_file(optimizer_tensors(model, optimizer), folder / FILES[1])
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
        raise
    _seal(folder, progress, type(optimizer).__name__)


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


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Load weights, and optimizer state if an optimizer is given. Files and model are compared before anything is changed.

    Raises CheckpointError naming the file if one is missing or damaged, if names, shapes or dtypes of the weights are not the model's, or
    if the optimizer is of another class or its moments of other shapes.
    """
    state = _read_state(path)
    device = next(model.parameters()).device
    weights = _read_tensors(path / FILES[0], state)
    _compare(path / FILES[0], weights, model_tensors(model))
    if optimizer is not None and state["optimizer"] is not None:
        if state["optimizer"] != type(optimizer).__name__:
            found, given = state["optimizer"], type(optimizer).__name__
            raise CheckpointError(f"{path / FILES[1]}: holds state of {found}, not of {given}: {ANOTHER}")
        entries = _read_tensors(path / FILES[1], state)
        _load_optimizer(path / FILES[1], entries, model, optimizer, device)
    with torch.no_grad():
        for name, value in _named_state(model):
            value.copy_(weights[name])
    return Progress(state["step"], state["seconds"], state["skipped_in_a_row"])


def load_parameters(path: Path, model: nn.Module) -> None:
    """Load another run's weights to start from. Balancing biases belong to the run that moved them and are not taken.

    Raises CheckpointError as `load_checkpoint` does.
    """
    weights = _read_tensors(path / FILES[0], _read_state(path))
    own = {name: p.detach() for name, p in model.named_parameters()}
    biases = {name for name in weights if name.endswith(".e_score_correction_bias")}
    _compare(path / FILES[0], {name: value for name, value in weights.items() if name not in biases}, own)
    for name, p in own.items():
        p.copy_(weights[name])


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, tied ones once, and buffers that are part of the state."""
    return {name: value.detach().contiguous() for name, value in _named_state(model)}


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by `<parameter name>/<key>`, every entry a tensor."""
    return {f"{name}/{key}": torch.as_tensor(value).contiguous() for name, _, key, value in _state_entries(model, optimizer)}


def _state_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, str, Any]]:
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            yield name, p, key, value


def _load_optimizer(
    path: Path, entries: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    names = {p: name for name, p in model.named_parameters()}
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, value in entries.items():
        name, _, key = full_name.rpartition("/")
        by_name.setdefault(name, {})[key] = value if key == "step" else value.to(device)
    if unknown := sorted(set(by_name) - set(names.values())):
        raise CheckpointError(f"{path}: holds state of {unknown[0]!r}, which the model does not have: {ANOTHER}")
    state_dict = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    for p in params:
        for key, value in by_name.get(names[p], {}).items():
            if key in ("exp_avg", "exp_avg_sq") and value.shape != p.shape:
                raise CheckpointError(
                    f"{path}: {names[p]}/{key} has shape {tuple(value.shape)}, but the parameter {tuple(p.shape)}: {ANOTHER}"
                )
    state_dict["state"] = {index: by_name[names[p]] for index, p in zip(ids, params, strict=True) if names[p] in by_name}
    optimizer.load_state_dict(state_dict)


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


def _compare(file: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in sorted(set(found) ^ set(expected)):
        where = "lacks" if name in expected else "has a surplus"
        raise CheckpointError(f"{file}: {where} {name!r}: {ANOTHER}")
    for name, value in found.items():
        if value.shape != expected[name].shape or value.dtype != expected[name].dtype:
            raise CheckpointError(
                f"{file}: {name!r} is {tuple(value.shape)} {value.dtype}, but the model's {tuple(expected[name].shape)} "
                f"{expected[name].dtype}: {ANOTHER}"
            )


def _remedy(path: Path) -> str:
    return f"delete {path} to go on from the checkpoint before it"


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
