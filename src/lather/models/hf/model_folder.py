"""Reads models from Hugging Face folders: `config.json`, and safetensors in one file or in shards
with an index.

Tensors are streamed: besides the model itself, only a single tensor, or a single expert of a stack,
is in memory at any moment. Before anything is changed, the weights are compared with the model
(`published_weights`).

`model_export` writes such folders. `key_map` has the names of tensors, `safetensors_folder` the
file format, and `families` the supported configurations.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from lather.errors import ExchangeError, UserError
from lather.files import StrPath, read_text
from lather.hub import CONFIG_FILE
from lather.models.decoder import Decoder
from lather.models.entry_names import split_entry
from lather.models.families import ModelConfig, build_model, family_of
from lather.models.hf.config_json import config_from_hugging_face, unread_fields
from lather.models.hf.key_map import MTP_COPIES, Shape
from lather.models.hf.published_weights import LAYER, PublishedWeights, first_name, match_headers
from lather.models.hf.safetensors_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    open_published,
    read_index,
)
from lather.safetensors_file import (
    ANOTHER_COPY,
    DTYPES,
    open_safetensors,
)


class Reading(TypedDict, total=False):
    """Arguments of functions that read a `config.json`."""

    model_type: str
    """The family, as in `[model]`; left out: that which the file names."""
    ignore_fields: Collection[str]
    """Fields that are passed over; `rope_scaling.KEY` for one in another."""


def read_config(folder: StrPath, **reading: Unpack[Reading]) -> ModelConfig:
    """Read the configuration of a Hugging Face folder. Blocks of multi-token prediction of which
    the folder has no tensor are left out: transformers counts them and does not write them.

    Raises ExchangeError if it is missing or damaged, or if it has an unsupported family or field.
    """
    config = _read_described(Path(folder), reading)
    depths = config.num_nextn_predict_layers
    names = _names_listed(Path(folder)) if depths else []
    first, prefix = config.num_hidden_layers, family_of(config).prefix
    starts = tuple(f"{prefix}layers.{first + depth}." for depth in range(depths))
    if names and not any(name.startswith(starts) for name in names):
        return dataclasses.replace(config, num_nextn_predict_layers=0)  # type: ignore[call-arg]
    return config


def _read_described(folder: Path, reading: Reading) -> ModelConfig:
    """Read the configuration that `config.json` describes."""
    file = folder / CONFIG_FILE
    mapping = read_json(file, "give the folder of a model, with config.json and safetensors")
    try:
        return config_from_hugging_face(mapping, **reading)
    except (UserError, OverflowError) as error:  # an integer may be too large for a float
        raise ExchangeError(f"{file}: {error}") from None


def notes_on_config(folder: StrPath, **reading: Unpack[Reading]) -> list[str]:
    """Return sentences about what `read_config` accepts in the `config.json` of a folder although
    other programs may read it differently: fields that no code for the family reads, fields that
    are ignored as told, and fields that Lather obeys and transformers does not; and about tensors
    of the folder that are left out.

    Raises ExchangeError as `read_config` does.
    """
    config, file = read_config(folder, **reading), Path(folder) / CONFIG_FILE
    described = _read_described(Path(folder), reading)
    ignored = reading.get("ignore_fields", ())
    unread = unread_fields(read_json(file, ANOTHER_COPY), family_of(config))
    notes = []
    if names := ", ".join(name for name in unread if name not in ignored):
        notes.append(f"{file}: no code for {config.model_type} reads {names}: passed over")
    if ignored:
        notes.append(f"{file}: ignored as told: {', '.join(ignored)}")
    pattern = family_of(config).left_out
    if pattern and (left_out := _names_in(Path(folder), pattern)):
        notes.append(f"{folder}: {first_name(left_out)}, of other parts of the model, are left out")
    mtp_blocks = _names_in(Path(folder), r"model\.layers\.\d+\.eh_proj\.weight")
    if len(mtp_blocks) > config.num_nextn_predict_layers:
        notes.append(
            f"{folder}: blocks of multi-token prediction, which num_nextn_predict_layers of "
            f"{CONFIG_FILE} does not count, are left out"
        )
    of_copies = rf"{LAYER.pattern}({'|'.join(map(re.escape, MTP_COPIES))})"
    if config.num_nextn_predict_layers and (copies := _names_in(Path(folder), of_copies)):
        notes.append(
            f"{folder}: {first_name(copies)}, copies of embedding and head for multi-token "
            "prediction, are not read or compared: the model's own are used"
        )
    if config.num_nextn_predict_layers < described.num_nextn_predict_layers:
        notes.append(
            f"{folder}: has no tensor of the blocks of multi-token prediction, which "
            f"num_nextn_predict_layers of {CONFIG_FILE} counts: the model is built without them"
        )
    return [*notes, config.transformers_note] if config.transformers_note else notes


def _names_in(folder: Path, pattern: str) -> list[str]:
    """Return the names of the folder's tensors that match a regular expression; none if its weights
    cannot be opened, which whoever loads them is told."""
    try:
        names = open_published(folder).tensors
    except ExchangeError:
        return []
    return [name for name in names if re.fullmatch(pattern, name)]


def _names_listed(folder: Path) -> list[str]:
    """Return the names of the folder's tensors, of which an index, without its files, is enough;
    none if they cannot be read."""
    try:
        if (folder / SINGLE_FILE).exists():
            return [*open_safetensors(folder / SINGLE_FILE).tensors]
        return [*read_index(folder / INDEX_FILE)]
    except ExchangeError:
        return []


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return names and shapes of a model's parameters and buffers, without allocating them."""
    return {name: tuple(weight.shape) for name, weight in _weights_of(_on_meta(config)).items()}


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object. Raises ExchangeError, with the remedy, if the file is missing or
    damaged."""
    try:
        mapping = json.loads(read_text(file))
        if not isinstance(mapping, dict):
            raise ValueError("not a JSON object")
        return mapping
    except (OSError, ValueError, RecursionError) as error:
        raise ExchangeError(f"{file}: missing or damaged ({error}): {remedy}") from None


def open_hugging_face(
    folder: StrPath, **reading: Unpack[Reading]
) -> tuple[PublishedWeights, ModelConfig]:
    """Open the weights of a Hugging Face folder, check that they match its configuration, and
    return both.

    Raises ExchangeError, with the file and the field or tensor, if anything is missing, damaged,
    surplus or not supported, or if a head differs from the embedding that it is tied to.
    """
    config = read_config(folder, **reading)
    return match_headers(Path(folder), family_of(config), weight_shapes(config)), config


def _open_and_warn(folder: StrPath, reading: Reading) -> tuple[PublishedWeights, ModelConfig]:
    opened = open_hugging_face(folder, **reading)
    for note in notes_on_config(folder, **reading):
        warnings.warn(note, stacklevel=3)
    return opened


def load_hugging_face(folder: StrPath, model: nn.Module, **reading: Unpack[Reading]) -> None:
    """Set a model's parameters and buffers to the folder's weights, which may have any floating
    dtype. Warn of what `notes_on_config` returns.

    If the folder cannot be read, or does not hold exactly the model's weights, this raises
    ExchangeError and changes nothing."""
    weights, _ = _open_and_warn(folder, reading)
    shapes = {name: tuple(weight.shape) for name, weight in _weights_of(model).items()}
    if different := sorted(
        {
            name
            for name in {**shapes, **weights.shapes}
            if shapes.get(name) != weights.shapes.get(name)
        }
    ):
        there, here = (shape.get(different[0], "absent") for shape in (weights.shapes, shapes))
        raise ExchangeError(
            f"{folder}: holds another model: {different[0]} is {there} there and {here} here: "
            f"build the model from its {CONFIG_FILE}"
        )
    _fill(model, weights)


def model_from_hugging_face(
    folder: StrPath,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **reading: Unpack[Reading],
) -> tuple[Decoder, ModelConfig]:
    """Load the model in a Hugging Face folder; return it and its configuration.

    `dtype` None: the stored dtype of the embedding. Warns of what `notes_on_config` returns. If the
    folder cannot be read, ExchangeError is raised before memory is allocated.
    """
    weights, config = _open_and_warn(folder, reading)
    stored = weights.stored.tensors[weights.entries["embed_tokens.weight"][0].published].dtype
    model = _on_meta(config).to(dtype or DTYPES[stored])
    if config.tie_word_embeddings:  # to_empty would allocate the shared weight twice
        model.lm_head.weight = None  # type: ignore[assignment]
    model.to_empty(device=device or torch.device("cpu"))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    _fill(model, weights)
    return model, config


@torch.no_grad()
def _fill(model: nn.Module, weights: PublishedWeights) -> None:
    tensors = _weights_of(model)
    for name in weights.tensors:
        weight, at = split_entry(name)
        tensors[weight][at].copy_(weights.read(name))


def _on_meta(config: ModelConfig) -> Decoder:
    return build_model(config, torch.Generator(), torch.device("meta"))
