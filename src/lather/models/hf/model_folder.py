"""Reads models from Hugging Face folders: `config.json`, and safetensors in one file or in shards
with an index.

Tensors are streamed: besides the model itself, only a single tensor, or a single expert of a stack,
is in memory at any moment. Before anything is changed, the names, shapes and dtypes in all headers
are compared with the model, and the values of a head with those of the embedding that it is tied
to.

`model_export` writes such folders. `key_map` has the names of tensors, `safetensors_folder` the
file format, and `families` the supported configurations.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from lather.errors import ExchangeError, UserError
from lather.files import StrPath, read_text
from lather.models.decoder import Decoder
from lather.models.entry_names import entry_shapes, split_entry
from lather.models.families import ModelConfig, build_model, family_of
from lather.models.hf.config_json import config_from_hugging_face, unread_fields
from lather.models.hf.fp8 import FACTORS, dequantize_fp8, factor_shape
from lather.models.hf.key_map import (
    HARMLESS,
    HEAD,
    MTP_COPIES,
    MappedTensor,
    Shape,
    published_formats,
)
from lather.models.hf.mxfp4 import BLOCK, dequantize_mxfp4
from lather.models.hf.safetensors_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    open_published,
    read_index,
)
from lather.safetensors_file import (
    ANOTHER_COPY,
    DTYPES,
    Index,
    SafetensorsFiles,
    TensorHeader,
    open_safetensors,
)

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
LAYER = re.compile(r".*layers\.\d+\.")
FP8_DTYPE = "F8_E4M3"
COMPARED_ELEMENTS = 2**20
"""Number of elements of two tensors that are compared at a time."""


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


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """The weights of a Hugging Face folder whose headers match a model. They are read on demand
    like those of a checkpoint: under Lather's names, with an entry per expert."""

    stored: SafetensorsFiles
    entries: dict[str, list[MappedTensor]]
    """Published tensors of each parameter and buffer, in the order of its memory."""
    shapes: dict[str, Shape]

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        return {
            name: TensorHeader("F32", shape) for name, shape in entry_shapes(self.shapes).items()
        }

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return `tensor[index]` on CPU, in its published dtype; for an expert the whole matrix is
        read."""
        parameter, at = split_entry(name)
        entries = self.entries[parameter]
        first = entries[0]
        if not at:
            if first.unsqueezed_dim is not None:
                return self.stored.read(first.published).squeeze(first.unsqueezed_dim)[index]
            return self._read_dequantized(first.published, index)
        if first.is_packed:
            return dequantize_mxfp4(
                *(self.stored.read(part, at) for part in first.published_shapes())
            )[index]
        if first.index:
            number = len(entries) // self.shapes[parameter][0]
            parts = entries[at[0] * number : (at[0] + 1) * number]
            return torch.cat([self._read_dequantized(part.published) for part in parts])[index]
        tensor = self.stored.read(first.published, at)
        return (tensor.T if first.is_transposed else tensor)[index]

    def _read_dequantized(self, name: str, index: Index = ()) -> Tensor:
        """Return `tensor[index]`, in fp32 if it is published in FP8: then the whole matrix is read,
        unless `index` is a slice of rows."""
        header = self.stored.tensors[name]
        if header.dtype != FP8_DTYPE:
            return self.stored.read(name, index)
        factors = self.stored.read(name + FACTORS)
        if len(index) == 1 and isinstance(rows := index[0], slice):
            first_row, _, _ = rows.indices(header.shape[0])
            return dequantize_fp8(self.stored.read(name, index), factors, first_row)
        return dequantize_fp8(self.stored.read(name), factors)[index]


def _match(folder: Path, config: ModelConfig) -> PublishedWeights:
    """Compare the headers of a folder with the weights of its model."""
    stored, family, shapes = open_published(folder), family_of(config), weight_shapes(config)
    entries = {
        name: _format_in(stored, published_formats(family, name, shape))
        for name, shape in shapes.items()
    }
    wanted: dict[str, tuple[Shape, bool]] = {}
    for name, published in entries.items():
        for entry in published:
            if entry.is_packed and shapes[name][-1] % BLOCK:
                raise ExchangeError(
                    f"{folder}: {entry.published} has rows of {shapes[name][-1]}, not whole MXFP4 "
                    "blocks: give a bf16 copy"
                )
            for key, shape in entry.published_shapes().items():
                wanted[key] = (shape, entry.is_packed)
                if key in stored.tensors and stored.tensors[key].dtype == FP8_DTYPE:
                    wanted[key + FACTORS] = (factor_shape(shape), False)
                    _check_has_factors(key, stored)
    if missing := [key for key in wanted if key not in stored.tensors]:
        raise ExchangeError(
            f"{folder}: lacks {first_name(missing)}, which {CONFIG_FILE} asks for: give the "
            "weights that belong to it"
            + (", or set its num_nextn_predict_layers to 0" if "eh_proj" in str(missing) else "")
        )
    is_tied = HEAD not in shapes
    surplus = [
        key
        for key in stored.tensors
        if key not in wanted
        and not re.fullmatch(family.left_out, key)
        and not _is_harmless(key, stored, is_tied=is_tied)
        and not _is_unread_mtp(key, stored, wanted)
    ]
    if surplus:
        raise ExchangeError(
            f"{stored.tensors[surplus[0]].file}: has a surplus {first_name(surplus)}, which a "
            f"model of {CONFIG_FILE} does not have: "
            "give the configuration that belongs to it"
        )
    for key, (shape, is_packed) in wanted.items():
        _check_tensor(key, stored, shape, is_packed=is_packed)
    if is_tied and HEAD in stored.tensors:
        _check_tied_head(stored, entries["embed_tokens.weight"][0].published)
    return PublishedWeights(stored, entries, dict(shapes))


def _format_in(stored: SafetensorsFiles, formats: list[list[MappedTensor]]) -> list[MappedTensor]:
    """Return the first format of which the folder has a tensor; the first of all if it has none."""
    for entries in formats:
        if any(name in stored.tensors for entry in entries for name in entry.published_shapes()):
            return entries
    return formats[0]


def _is_harmless(key: str, stored: SafetensorsFiles, *, is_tied: bool) -> bool:
    is_empty = 0 in stored.tensors[key].shape  # shared experts of a model that has none
    return is_empty or HARMLESS.fullmatch(key) is not None or (is_tied and key == HEAD)


def _is_unread_mtp(key: str, stored: SafetensorsFiles, wanted: Container[str]) -> bool:
    """Tell whether a surplus tensor is one of multi-token prediction: of a block that `config.json`
    leaves out, or a copy of embedding or head."""
    block = match[0] if (match := LAYER.match(key)) else ""
    projection = f"{block}eh_proj.weight"
    is_copy = key.removeprefix(block) in MTP_COPIES
    return projection in stored.tensors and (is_copy or projection not in wanted)


def _check_tensor(key: str, stored: SafetensorsFiles, shape: Shape, *, is_packed: bool) -> None:
    tensor = stored.tensors[key]
    if tensor.shape != shape:
        asks = f"{key.removesuffix(FACTORS)!r} asks" if FACTORS in key else f"{CONFIG_FILE} asks"
        raise ExchangeError(
            f"{tensor.file}: {key!r} has shape {tensor.shape}, but {asks} for {shape}: "
            "give the configuration that belongs to it"
        )
    floating = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
    if len(shape) != 2 or key.endswith(FACTORS):
        floating.remove(FP8_DTYPE)
    if tensor.dtype not in (["U8"] if is_packed else floating):
        raise ExchangeError(
            f"{tensor.file}: {key!r} is of dtype {tensor.dtype}, which is not supported: give a "
            "copy in BF16, F16 or F32"
        )


def _check_has_factors(key: str, stored: SafetensorsFiles) -> None:
    if key + FACTORS not in stored.tensors:
        raise ExchangeError(
            f"{stored.tensors[key].file}: {key!r} is of dtype {FP8_DTYPE} and lacks its factors, "
            f"{key + FACTORS!r}: give them, or a copy in BF16, F16 or F32"
        )


def _check_tied_head(stored: SafetensorsFiles, embedding: str) -> None:
    """Check that a published head that is tied to the embedding has the same values."""
    rows, columns = stored.tensors[embedding].shape
    _check_tensor(HEAD, stored, (rows, columns), is_packed=False)
    step = max(1, COMPARED_ELEMENTS // columns)
    for start in range(0, rows, step):
        at = (slice(start, min(start + step, rows)),)
        of_head, of_embedding = (stored.read(name, at).double() for name in (HEAD, embedding))
        if not torch.allclose(of_head, of_embedding, rtol=0, atol=0, equal_nan=True):
            raise ExchangeError(
                f"{stored.tensors[HEAD].file}: {HEAD!r} differs from {embedding!r}, but "
                f"{CONFIG_FILE} ties them: set its "
                f"tie_word_embeddings to false, or remove {HEAD!r} if it does not belong to the "
                "model"
            )


def first_name(names: list[str]) -> str:
    """Quote the first name, and count the others."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


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
    return _match(Path(folder), config), config


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
