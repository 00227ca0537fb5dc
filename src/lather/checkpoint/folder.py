"""The checkpoints of a run on disk: folders with names such as `step-00000100`, and the table of
each.

A user names a checkpoint RUN (the run's newest), RUN@STEP, or RUN@best (that with the lowest
validation loss on the held-out set that `train.patience_on` names). A run may also be named by its
config.toml, and a checkpoint by its own folder.

The table, `state.json`, lists the contents of a checkpoint and their files:

    progress, optimizer class
    files      name -> bytes and sha256
    tensors    name -> dtype, shape, and pieces that cover it without overlap: file, offsets, sizes
    digest     of all of the above

The tensors in a file are named by `piece_name`, so that each can be read on its own. Everything
that is read is checked, since a table may come from anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lather.boxes import Box
from lather.config.run_folder import CONFIGURATION, run_folder
from lather.config.toml_file import load_run
from lather.errors import CheckpointError, ExchangeError, UserError
from lather.files import delete_folder, digest_of, read_rows, read_text, remedy_of, sync
from lather.formats import CHECKPOINT
from lather.safetensors_file import DTYPES, TensorHeader

STATE_FILE = "state.json"
BEST = "best"
AVERAGE = "average/"
"""Prefix of the names of averaged weights."""
NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
RANK_FILE = re.compile(r"rank-\d{5,}\.safetensors")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first; none if there is no such folder.

    Raises OSError if the folder cannot be read: a run that has checkpoints must not begin again.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = (name for name in names if name.startswith("step-") and name[5:].isdigit())
    return sorted(folder / name for name in numbered if (folder / name).is_dir())


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, from its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is complete."""

    last: int
    """Number of newest checkpoints to keep, at least 1."""
    every: int = 0
    """Keep checkpoints whose step is a multiple of this; 0: none."""
    best: int | None = None
    """Keep the checkpoint of this step."""

    def delete_others(self, folder: Path) -> None:
        """Delete all other checkpoints. Each is renamed first, so that a kill leaves no incomplete
        checkpoint under its name."""
        for path in list_checkpoints(folder)[: -self.last]:
            step = step_of(path)
            if step != self.best and (not self.every or step % self.every):
                delete_folder(path.rename(folder / f".tmp-old-{path.name}"))


def find_checkpoint(run_at_step: str, step: int = -1) -> tuple[Path, Path]:
    """Return the run and the checkpoint that RUN, RUN@STEP or RUN@best names. The run's own name
    may contain an @.

    `step`: the value of an option `--step`, negative if it was not given. Raises UserError if there
    is no such run or checkpoint, listing the existing ones, or if both name a step.
    """
    (run, name), place = _split(run_at_step), run_at_step
    if step >= 0:
        if name is not None:
            raise UserError(
                f"{run_at_step} and --step {step} both say which checkpoint: give one of them"
            )
        name, place = str(step), f"--step {step}"
    folder = run / "checkpoints"
    # a training run may have replaced its only checkpoint during the first call
    paths = list_checkpoints(folder) or list_checkpoints(folder)
    checkpoints = {step_of(path): path for path in paths}
    if not checkpoints:
        raise UserError(f"{folder}: no checkpoint yet: let the run train first")
    if name is None:
        return run, checkpoints[max(checkpoints)]
    existing = ", ".join(map(str, checkpoints))
    if name == BEST:
        name_of_set = load_run(run).train.patience_on
        best = best_checkpoint(checkpoints, read_rows(run / "metrics.jsonl"), name_of_set)
        if best is None:
            of_set = f" on {name_of_set!r} (train.patience_on)" if name_of_set else ""
            raise UserError(
                f"{run}@{BEST}: no validation loss{of_set} is known for the kept checkpoints: use "
                f"one of {existing}"
            )
        return run, checkpoints[best[1]]
    if not (name.isascii() and name.isdigit() and int(name) in checkpoints):
        raise UserError(
            f"{place}: no such checkpoint in {folder}: use one of {existing}, or {BEST}"
        )
    return run, checkpoints[int(name)]


def _split(run_at_step: str) -> tuple[Path, str | None]:
    """Return the run, and the part after the @ if there is one."""
    whole = run_folder(Path(run_at_step))
    if (whole / CONFIGURATION).exists():
        return whole, None
    folder, run = whole.parent, whole.parent.parent
    is_of_run = folder.name == "checkpoints" and (run / CONFIGURATION).exists()
    if is_of_run and whole in list_checkpoints(folder):
        return run, str(step_of(whole))
    name, at, step = run_at_step.rpartition("@")
    run = run_folder(Path(name)) if at and name else whole
    if not (run / CONFIGURATION).exists():
        raise UserError(_no_run(run))
    return run, step


def _no_run(folder: Path) -> str:
    """Say why a folder is not a run, and what to give."""
    if not folder.exists():
        return f"{folder}: not a run (there is no such folder): give the run_dir of a training run"
    if (folder / "config.json").is_file():
        return (
            f"{folder}: not a run, but a Hugging Face folder: lather import {folder} RUN "
            "makes a run of it; or give the run_dir of a training run"
        )
    return f"{folder}: not a run (it has no {CONFIGURATION}): give the run_dir of a training run"


def best_checkpoint(
    steps: Collection[int], rows: Sequence[Mapping[str, Any]], name: str = ""
) -> tuple[float, int] | None:
    """Return the lowest validation loss at a step with a checkpoint, and that step; None if no
    loss at such a step is known. `name`: the held-out set, "" for the run's own."""
    losses = [
        (loss_on(row, name), row["step"])
        for row in rows
        if "validation_loss" in row and row["step"] in steps
    ]
    return min((pair for pair in losses if pair[0] < math.inf), default=None)


def loss_on(row: Mapping[str, Any], name: str) -> float:
    """Return the loss on a held-out set, "" for the run's own, from a validation's row of metrics;
    infinite if it is not there or not finite."""
    own = {name: row["validation_loss"]}  # if it is the only set
    loss = (row.get("validation_losses", own) if name else own).get(name)
    return math.inf if loss is None or math.isnan(loss) else float(loss)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Progress of a run, which is not part of weights and optimizer state."""

    step: int
    """Completed optimizer steps."""
    seconds: float
    """Seconds of training, in all processes that have worked on the run."""
    skipped_in_a_row: int = 0
    """Steps skipped directly before this one because their loss or gradient was not finite or a
    spike."""


@dataclass(frozen=True)
class StoredFile:
    """A file, as it was written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredEntry(TensorHeader):
    """A tensor of the whole model."""

    file_of: Mapping[Box, str]
    """File that contains each box; the boxes cover the tensor without overlap."""

    def to_json(self) -> dict[str, Any]:
        pieces = [[file, box.offset, box.size] for box, file in self.file_of.items()]
        return {"dtype": self.dtype, "shape": self.shape, "pieces": pieces}


@dataclass(frozen=True)
class Table:
    """The contents of `state.json`."""

    progress: Progress
    optimizer: str | None
    """Class of the optimizer; None if no optimizer state was saved."""
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredEntry]

    @property
    def has_average(self) -> bool:
        """Whether it has averaged weights."""
        return any(name.startswith(AVERAGE) for name in self.tensors)

    def write(self, folder: Path) -> None:
        """Write the table into the folder of the checkpoint, a line per file and tensor, and sync
        it."""
        files = {
            file.name: {"bytes": file.num_bytes, "sha256": file.sha256}
            for file in self.files.values()
        }
        tensors = {name: entry.to_json() for name, entry in self.tensors.items()}
        state = {
            "format": CHECKPOINT.number,
            **asdict(self.progress),
            "optimizer": self.optimizer,
            "files": files,
            "tensors": tensors,
        }
        (folder / STATE_FILE).write_text(_format({**state, "digest": digest_of(state)}), "utf-8")
        sync(folder / STATE_FILE)


def piece_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a piece in a rank's file: the tensor's own if the piece is the whole
    tensor, else with its indices: `w[4:8, :]`."""
    if box.size == tuple(shape):
        return name
    ranges = zip(box.offset, box.size, shape, strict=True)
    parts = [":" if size == whole else f"{start}:{start + size}" for start, size, whole in ranges]
    return f"{name}[{', '.join(parts)}]"


def read_table(folder: Path) -> Table:
    """Read the table of a checkpoint. Raises CheckpointError, naming the file, if it is missing,
    damaged, in another format or not a table of a checkpoint."""
    file = folder / STATE_FILE
    try:
        state = json.loads(read_text(file))
        if not isinstance(state, dict):
            raise ValueError("not a table")
        CHECKPOINT.check(state["format"], file)
        if state.pop("digest") != digest_of(state):
            raise ValueError("its digest is not that of its contents")
        return _table(state)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(file, error) from None


def damaged(file: Path, error: Exception) -> CheckpointError:
    """Return the error for a file of a checkpoint. A file that cannot be read may be whole."""
    cause = error.__context__ if isinstance(error, ExchangeError) else error
    if isinstance(cause, OSError) and not isinstance(cause, NO_FILE):
        text = remedy_of(cause) or "try again, or use another checkpoint"
        return CheckpointError(f"{file}: cannot be read ({cause.strerror or cause}): {text}")
    return CheckpointError(
        f"{file}: missing or damaged ({error}): delete {file.parent} to resume from the checkpoint "
        "before it"
    )


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless the boxes cover the tensor, each element once."""
    for box in boxes:
        inside = all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(box.offset, box.size, shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"a piece of {name!r} at {box.offset} of {box.size} is not within {tuple(shape)}"
            )
    if sum(box.numel for box in boxes) != math.prod(shape):
        raise ValueError(f"the pieces of {name!r} do not cover it")
    filled = sorted((box for box in boxes if box.numel), key=lambda box: box.offset)
    for number, box in enumerate(filled):
        for other in filled[number + 1 :]:
            if other.offset and other.offset[0] >= box.offset[0] + box.size[0]:
                break  # neither do later boxes overlap this box
            if box.overlap(other):
                raise ValueError(f"pieces of {name!r} overlap")


def _table(state: Mapping[str, Any]) -> Table:
    files = {name: _file(name, raw) for name, raw in state["files"].items()}
    tensors = {name: _entry(name, raw, files) for name, raw in state["tensors"].items()}
    optimizer, seconds = state["optimizer"], state["seconds"]
    if not (optimizer is None or isinstance(optimizer, str)):
        raise ValueError("its optimizer is not the name of a class")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise ValueError("its seconds are not a number")
    step, skipped = _sizes([state["step"], state["skipped_in_a_row"]])
    return Table(Progress(step, float(seconds), skipped), optimizer, files, tensors)


def _file(name: str, raw: Mapping[str, Any]) -> StoredFile:
    if not RANK_FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not a file of a checkpoint")
    (num_bytes,) = _sizes([raw["bytes"]])
    return StoredFile(name, num_bytes, str(raw["sha256"]))


def _entry(name: str, raw: Mapping[str, Any], files: Mapping[str, StoredFile]) -> StoredEntry:
    dtype, shape = raw["dtype"], _sizes(raw["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"{name!r} has an unknown dtype, {dtype!r}")
    pieces = [(Box(_sizes(offsets), _sizes(sizes)), file) for file, offsets, sizes in raw["pieces"]]
    for _, file in pieces:
        if file not in files:
            raise ValueError(f"{name!r} is in {file!r}, which is not listed")
    check_cover(name, shape, [box for box, _ in pieces])
    return StoredEntry(dtype, shape, dict(pieces))


def _sizes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(
        type(size) is int and 0 <= size < 2**63 for size in raw
    ):
        raise ValueError(f"{raw!r} is not a list of sizes")
    return tuple(raw)


def _format(values: Mapping[str, Any], indent: str = " ") -> str:
    """Write an object with a line for each of its values and, one level down, for each value of an
    object."""

    def text(value: Any) -> str:
        return (
            _format(value, "  ") if isinstance(value, dict) and indent == " " else json.dumps(value)
        )

    lines = ",\n".join(
        f"{indent}{json.dumps(name)}: {text(value)}" for name, value in values.items()
    )
    return f"{{\n{lines}\n{indent[1:]}}}"
