"""Writes models as Hugging Face folders: `config.json`, safetensors (one file, or shards with an index), tokenizer files.

Tensors are streamed: besides the model itself, only one tensor, or one expert of a stack, is in memory at any moment. A folder appears only
when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lather.errors import ExchangeError
from lather.models.entry_names import split_entry
from lather.models.families import ModelConfig, config_to_hugging_face
from lather.models.hf.key_map import Shape, written_entries
from lather.models.hf.model_folder import CONFIG_FILE, TOKENIZER_FILE, first_name, parameter_shapes, read_json
from lather.models.hf.safetensors_folder import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    Index,
    StrPath,
    TensorSource,
    TensorToWrite,
    complete_folder,
    write_safetensors,
)

COMPANIONS = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files of a model besides its configuration and weights."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
BALANCING_BIAS = ".e_score_correction_bias"
MAX_SHARD_BYTES = 5 * 10**9


class _ModelTensors:
    """The parameters and persistent buffers of a model, read like those of a file."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict().keys()
        self._tensors = {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if name in state}}

    def describe(self) -> dict[str, tuple[Shape, torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, index: Index) -> Tensor:
        return self._tensors[name].detach()[index]


class _StoredTensors:
    """The tensors of a checkpoint, which has one entry per expert, stacked like the parameters of a model."""

    def __init__(self, stored: TensorSource) -> None:
        self._stored = stored
        self._experts: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for entry in stored.tensors:
            name, expert = split_entry(entry)
            if expert is not None:
                self._experts[name][expert] = entry

    def describe(self) -> dict[str, tuple[Shape, torch.dtype]]:
        described = {}
        for entry, tensor in self._stored.tensors.items():
            name, expert = split_entry(entry)
            lead: Shape = ()
            if expert is not None:
                numbers = self._experts[name]
                lead = (len(numbers) if all(number in numbers for number in range(len(numbers))) else 0,)
            described[name] = ((*lead, *tensor.shape), DTYPES[tensor.dtype])
        return described

    def read(self, name: str, index: Index) -> Tensor:
        if name not in self._experts:
            return self._stored.read(name, index)
        experts = self._experts[name]
        if index:
            assert isinstance(index[0], int)
            return self._stored.read(experts[index[0]], index[1:])
        return torch.stack([self._stored.read(experts[e]) for e in range(len(experts))])


def save_hugging_face(
    source: nn.Module | TensorSource,
    config: ModelConfig,
    folder: StrPath,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    tokenizer: StrPath | None = None,
) -> None:
    """Write a model as a Hugging Face folder that `transformers` loads.

    Args:
        source: a model, or the tensors of a checkpoint, one entry per expert.
        folder: must not exist, or be empty; it appears when it is complete.
        max_shard_bytes: largest file, bytes; a larger tensor gets a file of its own.
        dtype: dtype of the written weights; None: that of the source.
        tokenizer: a `tokenizer.json`, or a folder whose tokenizer and generation files are copied.

    Raises ExchangeError, before anything is written, if the source's tensors are not those of a model of this configuration, if
    `max_shard_bytes` is below 1, or if `folder` holds something.
    """
    if max_shard_bytes < 1:
        raise ExchangeError(f"max_shard_bytes = {max_shard_bytes} is not valid: give at least 1 byte")
    tensors = _ModelTensors(source) if isinstance(source, nn.Module) else _StoredTensors(source)
    described = tensors.describe()
    shapes = parameter_shapes(config)
    _check_source({name: shape for name, (shape, _) in described.items()}, shapes)
    published = config_to_hugging_face(config)
    parameter = {entry.published: entry for entry in written_entries(published["model_type"], shapes)}
    to_write = []
    for name, entry in parameter.items():
        (shape,) = entry.published_shapes(entry.part_shape(shapes[entry.parameter])).values()
        to_write.append(TensorToWrite(name, dtype or described[entry.parameter][1], shape))

    def pieces(name: str) -> Iterator[Tensor]:
        entry = parameter[name]
        if entry.is_transposed:
            yield from (tensors.read(entry.parameter, (e,)).T for e in range(shapes[entry.parameter][0]))
        else:
            yield tensors.read(entry.parameter, entry.index)

    shards = _shards(to_write, max_shard_bytes)
    with complete_folder(Path(folder)) as aside:
        for file, shard in shards.items():
            write_safetensors(aside / file, shard, pieces)
        if list(shards) != [SINGLE_FILE]:
            _write_json(aside / INDEX_FILE, _index(shards))
        ids = {} if tokenizer is None else _write_companions(aside, Path(tokenizer), config.max_position_embeddings)
        embedding = dtype or described["embed_tokens.weight"][1]
        _write_json(aside / CONFIG_FILE, {**published, **ids, "dtype": str(embedding).removeprefix("torch.")})


def _check_source(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    if biases := sorted(name for name in found if name.endswith(BALANCING_BIAS)):
        raise ExchangeError(
            f"{first_name(biases)} of loss-free balancing cannot be exported: published models of this family have no such bias and would "
            "route differently: train with moe.bias_update_rate = 0 to export"
        )
    if different := sorted(name for name in {**expected, **found} if found.get(name) != expected.get(name)):
        raise ExchangeError(
            f"{first_name(different)} of the weights does not match the configuration: give the one that they were trained with"
        )


def _shards(tensors: list[TensorToWrite], max_bytes: int) -> dict[str, list[TensorToWrite]]:
    """Distribute the tensors, in order, over files; return these by name."""
    groups: list[list[TensorToWrite]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _index(shards: Mapping[str, list[TensorToWrite]]) -> dict[str, Any]:
    size = sum(tensor.num_bytes for shard in shards.values() for tensor in shard)
    return {"metadata": {"total_size": size}, "weight_map": {tensor.name: file for file, shard in shards.items() for tensor in shard}}


def copy_companions(source: StrPath, target: StrPath) -> list[str]:
    """Copy the tokenizer and generation files that exist; return their names."""
    found = [name for name in COMPANIONS if (Path(source) / name).is_file()]
    for name in found:
        shutil.copyfile(Path(source) / name, Path(target) / name)
    return found


def _write_companions(folder: Path, tokenizer: Path, max_length: int) -> dict[str, Any]:
    """Copy or make the tokenizer's files in `folder`; return the ids of its special tokens, for config.json."""
    if tokenizer.is_dir():
        copy_companions(tokenizer, folder)
        original = tokenizer / CONFIG_FILE
        before = read_json(original, "restore it, or delete it") if original.exists() else {}
        return {key: before[key] for key in TOKEN_IDS if key in before}
    content = read_json(tokenizer, "give another tokenizer")
    shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
    special = [token for token in content.get("added_tokens", []) if token["special"]]
    ends = special[0] if len(special) == 1 else None  # the only special token of Lather's own tokenizers ends a document
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | ({"eos_token": ends["content"]} if ends else {}))
    return {"bos_token_id": None, "eos_token_id": ends["id"] if ends else None}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
