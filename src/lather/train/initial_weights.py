"""The initial weights of a new run that are read from another run or from a Hugging Face folder.

Every rank reads its part. Adapters of the other run are merged into its weights: a run starts from
a model and adds new adapters."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import fields
from pathlib import Path

import torch

from lather.boxes import Piece
from lather.checkpoint.folder import find_checkpoint, list_checkpoints
from lather.checkpoint.held import held_checkpoint
from lather.checkpoint.reader import load_parameters, open_checkpoint
from lather.checkpoint.state import TrainingState
from lather.config.config import Config
from lather.config.toml_file import folder_of, load_run, model_of
from lather.errors import CheckpointError, ConfigError, DataError, as_toml
from lather.hub import CONFIG_FILE, TOKENIZER_FILE
from lather.models.adapted import MergedTensors, is_adapters
from lather.models.families import ModelConfig
from lather.models.hf.model_folder import (
    notes_on_config,
    open_hugging_face,
)
from lather.models.routing import CORRECTION_BIAS
from lather.optim.batched.remainders import REMAINDER, set_weight
from lather.parallel.agreement import broadcast, errors_on_all_ranks
from lather.safetensors_file import TensorSource
from lather.train.companions import same_tokenizer


def find_weights(config: Config) -> Path:
    """Return the checkpoint of a run, or the Hugging Face folder, that `init_from` names.

    Raises ConfigError if its model differs from `[model]`, CheckpointError if it has no weights,
    DataError if no tokenizer is known for it."""
    name, source = config.init_from, folder_of(config.init_from)
    weights = source
    if (source / CONFIG_FILE).is_file() and config.init_weights != "raw":
        raise ConfigError(
            f"init_weights = {config.init_weights!r} applies to runs, and "
            f"init_from = {name!r} is a Hugging Face folder: leave it out"
        )
    if not (source / CONFIG_FILE).is_file():
        checkpoints = list_checkpoints(source / "checkpoints")
        if not checkpoints:
            raise CheckpointError(
                f"init_from = {name!r} has no checkpoint: give a run directory that has one, "
                "or a folder with config.json and safetensors"
            )
        weights = checkpoints[-1] if source == Path(name) else find_checkpoint(name)[1]
        if config.init_weights == "average":
            open_checkpoint(weights).weights(averaged=True)  # raises if there is none
    check_same_model(name, model_of(name, **config.reading), config.model)
    has_tokenizer = config.data.tokenizer or config.data.path or (source / TOKENIZER_FILE).exists()
    if not has_tokenizer:
        raise DataError(
            f"init_from = {name!r} has no tokenizer.json: give its model's tokenizer "
            "as data.tokenizer"
        )
    return weights


def notes_on_weights(path: Path, config: Config) -> list[str]:
    """Return sentences about the Hugging Face folder that `find_weights` returned, and about
    positions that its model, or that of a checkpoint, was not trained with."""
    is_published = (path / CONFIG_FILE).is_file()
    notes = notes_on_config(path, **config.reading) if is_published else []
    theirs, ours = model_of(config.init_from, **config.reading), config.model
    if theirs.rope_scaling != ours.rope_scaling and (scaling := ours.rope_scaling) is not None:
        before = "no" if theirs.rope_scaling is None else "another"
        notes.append(
            f"model.rope_scaling: {scaling.rope_type}, factor {scaling.factor:g}, for a model of "
            f"{scaling.original_max_position_embeddings:,} positions, so sequences of up to "
            f"{ours.max_position_embeddings:,} tokens; init_from has {before} scaling"
        )
    elif config.train.sequence_length > theirs.max_position_embeddings:
        notes.append(
            f"train.sequence_length is {config.train.sequence_length:,}, but the model of "
            f"init_from has {theirs.max_position_embeddings:,} positions: model.rope_scaling.factor"
            " adapts it to longer sequences"
        )
    return notes


def check_same_model(init_from: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Raise ConfigError, naming the first field that differs, unless both models compute the same
    from the same weights; ours may have fewer blocks of multi-token prediction, and a scaling of
    its own of the rotary embedding, for longer sequences."""
    of_training = {"initializer_range", "max_position_embeddings", *ours.balance_fields}
    names = [field.name for field in fields(ours) if field.name not in of_training]
    if type(theirs) is not type(ours):
        names = ["model_type"]
    for name in names:
        old, new = getattr(theirs, name), getattr(ours, name)
        may_differ = name == "num_nextn_predict_layers" and new < old
        may_differ |= name == "rope_scaling" and new is not None
        if old != new and not may_differ:
            raise ConfigError(
                f"init_from = {init_from!r} is another model: "
                f"model.{name} is {as_toml(old)} there and {as_toml(new)} here: "
                "leave out [model] to train that model, or give weights of this one"
            )


def check_same_tokenizer(source: Path, ours: Path, *, is_given: bool) -> None:
    """Raise DataError if the initial weights were trained with another tokenizer than that of the
    data set; `is_given`: it is a data set of `data.path`, not made for this run."""
    theirs = source / TOKENIZER_FILE
    if theirs.exists() and not same_tokenizer(theirs, ours):
        what, remedy = "another tokenizer", f"give data.tokenizer = {str(theirs)!r}"
        if is_given:
            what = f"another tokenizer than that of {ours.parent}"
            make = f"lather data make NEW SOURCE --tokenizer {shlex.quote(str(source))}"
            remedy = f"make the data set with `{make}`, and give it as data.path"
        raise DataError(f"init_from = {str(source)!r} was trained with {what}: {remedy}")


def load_weights(path: Path, state: TrainingState, config: Config) -> None:
    """Load the weights that `find_weights` returned; every rank calls this and reads its part.
    Adapters are not changed.

    Raises CheckpointError or ExchangeError, on all ranks, if the weights are damaged or do not fit.
    """
    group = state.mesh.control_group
    if (path / CONFIG_FILE).is_file():
        with errors_on_all_ranks(group):
            copy_weights(open_hugging_face(path, **config.reading)[0], state)
        return
    run = path.parent.parent
    theirs, averaged = load_run(run), config.init_weights == "average"
    differ = theirs.lora.rank or theirs.model.num_nextn_predict_layers
    with contextlib.ExitStack() as cleanup:
        held = path
        if state.mesh.rank == 0:  # until all ranks have read it
            held = cleanup.enter_context(held_checkpoint(run, lambda: path))
        held = broadcast(held, group)
        if differ or any(is_adapters(name) for name in state.names()):
            with errors_on_all_ranks(group):
                weights = open_checkpoint(held).weights(averaged=averaged)
                copy_weights(MergedTensors(weights, theirs.lora.scale), state)
        else:
            load_parameters(held, state, averaged=averaged)


def checked_pieces(source: TensorSource, state: TrainingState) -> list[Piece]:
    """Return this rank's pieces of those weights that the source has. It may lack adapters and
    correction biases.

    Raises CheckpointError if the source lacks another weight or a shape differs.
    """
    headers = source.tensors
    pieces = [
        piece
        for piece in state.weights()
        if piece.name in headers
        or not (is_adapters(piece.name) or piece.name.endswith(CORRECTION_BIAS))
    ]
    for piece in pieces:
        shape = headers[piece.name].shape if piece.name in headers else "absent"
        if shape != piece.shape:
            raise CheckpointError(
                f"{piece.name!r} is {shape} in the given weights, but {piece.shape} in the model: "
                "give weights of this model"
            )
    return pieces


@torch.no_grad()
def copy_weights(source: TensorSource, state: TrainingState) -> None:
    """Copy the `checked_pieces` into this rank's weights. Raises CheckpointError, before anything
    is changed, as that does."""
    pieces, remainders = checked_pieces(source, state), state.remainders()
    for piece in pieces:
        rows = (slice(piece.offset[0], piece.offset[0] + len(piece.value)),) if piece.shape else ()
        assert piece.value.shape[1:] == piece.shape[1:], piece.name
        if piece.value.numel():
            x, r = source.read(piece.name, rows), remainders.get(piece.key)
            state_of = {} if r is None else {REMAINDER: r}
            set_weight(piece.value, x if r is None else x.to(r.device, torch.float32), state_of)
