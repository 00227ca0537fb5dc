"""Writes models as Hugging Face folders: `config.json`, safetensors (one file, or shards with an
index), tokenizer files.

Tensors are streamed: besides the model itself, only a single tensor, or a single expert of a stack,
is in memory at any moment. A folder appears only when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lather.errors import ExchangeError
from lather.files import StrPath, complete_folder, write_json
from lather.hub import CONFIG_FILE, TOKENIZER_FILE, TOOLS_TEMPLATE_FILE
from lather.models.entry_names import entry_shapes, split_entry
from lather.models.families import ModelConfig, family_of
from lather.models.hf.config_json import config_to_hugging_face
from lather.models.hf.key_map import MTP_COPIES, MappedTensor, Shape, published_formats
from lather.models.hf.model_folder import (
    read_json,
    weight_shapes,
)
from lather.models.hf.published_weights import first_name
from lather.models.hf.safetensors_folder import write_published
from lather.models.routing import CORRECTION_BIAS
from lather.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    Index,
    TensorHeader,
    TensorSource,
    TensorToWrite,
)

GENERATION_FILE = "generation_config.json"
OF_TOKENIZERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
)
COMPANIONS = (
    TOKENIZER_FILE,
    *OF_TOKENIZERS,
    "chat_template.jinja",
    "chat_template.json",
    TOOLS_TEMPLATE_FILE,
    GENERATION_FILE,
)
"""Files of a model besides its configuration and weights."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_SHARD_BYTES = 5 * 10**9


class _ModelTensors:
    """The parameters and persistent buffers of a model, read like those of a checkpoint: with an
    entry per expert."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict().keys()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items() if name in state}

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        dtypes = {
            name: DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            for name, tensor in self._tensors.items()
        }
        shapes = entry_shapes({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})
        return {
            name: TensorHeader(dtypes[split_entry(name)[0]], shape)
            for name, shape in shapes.items()
        }

    def read(self, name: str, index: Index = ()) -> Tensor:
        parameter, at = split_entry(name)
        return self._tensors[parameter][at + index]


def save_hugging_face(
    source: nn.Module | TensorSource,
    config: ModelConfig,
    folder: StrPath,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    tokenizer: StrPath | None = None,
    ends: Sequence[int] = (),
) -> None:
    """Write a model as a Hugging Face folder that `transformers` loads.

    Args:
        source: a model, or the tensors of a checkpoint, an entry per expert.
        folder: must not exist, or be empty; it appears when it is complete.
        max_shard_bytes: largest file, bytes; a larger tensor gets a file of its own.
        dtype: dtype of the written weights; None: that of the source.
        tokenizer: a `tokenizer.json`, or a folder whose tokenizer and generation files are copied.
        ends: tokens that end a text, for generation_config.json, if none is copied.

    Raises ExchangeError, before anything is written, if the source's tensors are not those of a
    model of this configuration, if `max_shard_bytes` is below 1, or if `folder` holds something.
    """
    if max_shard_bytes < 1:
        raise ExchangeError(
            f"max_shard_bytes = {max_shard_bytes} is not valid: give at least 1 byte"
        )
    weights = _ModelTensors(source) if isinstance(source, nn.Module) else source
    to_write = _to_write(weights, config, dtype)
    fields = config_to_hugging_face(config)
    with complete_folder(Path(folder)) as aside:
        write_published(aside, to_write, max_shard_bytes)
        ids: dict[str, Any] = {}
        if tokenizer is not None:
            ids = write_companions(aside, Path(tokenizer), config.max_position_embeddings)
        if ends and not (aside / GENERATION_FILE).exists():
            end = list(ends) if len(ends) > 1 else ends[0]
            write_json(aside / GENERATION_FILE, {**ids, "eos_token_id": end})
        embedding = dtype or DTYPES[weights.tensors["embed_tokens.weight"].dtype]
        fields.get(family_of(config).text_field, fields).update(ids)
        write_json(aside / CONFIG_FILE, {**fields, "dtype": str(embedding).removeprefix("torch.")})


def published_tensors(
    weights: TensorSource, config: ModelConfig, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the tensors that `save_hugging_face` writes, one at a time.

    Raises ExchangeError, before anything is read, if the tensors are not those of a model of this
    configuration.
    """
    for tensor in _to_write(weights, config, dtype):
        pieces = [piece.to(tensor.dtype).flatten() for piece in tensor.pieces]
        yield tensor.name, torch.cat(pieces).view(tensor.shape)


def _to_write(
    weights: TensorSource, config: ModelConfig, dtype: torch.dtype | None
) -> list[TensorToWrite]:
    """Return the tensors of a folder, which are read from `weights` when they are written."""
    stored, shapes = weights.tensors, weight_shapes(config)
    _check_source({name: tensor.shape for name, tensor in stored.items()}, entry_shapes(shapes))
    parts = [
        part
        for parameter, shape in shapes.items()
        for part in published_formats(family_of(config), parameter, shape)[0]
    ]
    to_write = []
    for part in [*parts, *_copies(config, shapes)]:
        ((name, published_shape),) = part.published_shapes().items()
        stored_dtype = DTYPES[stored[part.entries[0]].dtype]
        # bf16 could change the choice of experts
        is_bias = part.parameter.endswith(CORRECTION_BIAS)
        written_dtype = stored_dtype if dtype is None or is_bias else dtype
        pieces = _pieces(part, weights)
        to_write.append(TensorToWrite(name, written_dtype, published_shape, pieces))
    return to_write


def _copies(config: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[MappedTensor]:
    """Yield the copies of embedding and head in the blocks of multi-token prediction."""
    embedding, layers = "embed_tokens.weight", config.num_hidden_layers
    for layer in range(layers, layers + config.num_nextn_predict_layers):
        for name, original in MTP_COPIES.items():
            source = original if original in shapes else embedding
            published = f"{family_of(config).prefix}layers.{layer}.{name}"
            yield MappedTensor(published, source, shapes[embedding])


def _pieces(part: MappedTensor, weights: TensorSource) -> Iterator[Tensor]:
    for entry in part.entries:
        tensor = weights.read(entry, part.index[1:])
        if part.unsqueezed_dim is not None:
            tensor = tensor.unsqueeze(part.unsqueezed_dim)
        yield tensor.T if part.is_transposed else tensor


def _check_source(shapes: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    surplus = sorted(shapes.keys() - expected.keys())
    if biases := [name for name in surplus if name.endswith(CORRECTION_BIAS)]:
        raise ExchangeError(
            f"{first_name(biases)} of loss-free balancing cannot be exported: published models of "
            "this family have no such bias and would "
            "route differently: train with moe.bias_update_rate = 0 to export"
        )
    if different := sorted(
        {
            split_entry(name)[0]
            for name in {**expected, **shapes}
            if shapes.get(name) != expected.get(name)
        }
    ):
        raise ExchangeError(
            f"{first_name(different)} of the weights does not match the configuration: give the "
            "configuration that they were trained with"
        )


def copy_companions(source: StrPath, target: StrPath) -> list[str]:
    """Copy the tokenizer and generation files that exist; return their names."""
    names = [name for name in COMPANIONS if (Path(source) / name).is_file()]
    for name in names:
        (Path(target) / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(source) / name, Path(target) / name)
    return names


def token_ids(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens in a parsed config.json, of which those that are not given
    may stand with the nested fields of a text model."""
    text = settings.get("text_config")
    nested = text if isinstance(text, Mapping) else {}
    return {
        key: nested.get(key) if settings.get(key) is None else settings[key]
        for key in TOKEN_IDS
        if key in settings or key in nested
    }


def write_companions(folder: Path, tokenizer: Path, max_length: int) -> dict[str, Any]:
    """Copy or make the tokenizer's files in `folder`; return the ids of its special tokens, for
    config.json."""
    if tokenizer.is_dir():
        copy_companions(tokenizer, folder)
        original = tokenizer / CONFIG_FILE
        before = read_json(original, "restore it, or delete it") if original.exists() else {}
        return token_ids(before)
    content = read_json(tokenizer, "give another tokenizer")
    shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
    special = [token for token in content.get("added_tokens", []) if token["special"]]
    # the only special token of Lather's own tokenizers ends a document
    ends = special[0] if len(special) == 1 else None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(
        folder / "tokenizer_config.json",
        settings | ({"eos_token": ends["content"]} if ends else {}),
    )
    return {"bos_token_id": None, "eos_token_id": ends["id"] if ends else None}
