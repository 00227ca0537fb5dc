"""Reads and writes models as Hugging Face folders: `config.json`, safetensors (one file, or shards with an index), tokenizer files.

Tensors are streamed: besides the model itself, only one tensor, or one expert of a stack, is in memory at any moment. Before anything is
changed, the names, shapes and dtypes in all headers are compared with the model, and the values of a head with those of the embedding that
it is tied to. A folder appears only when it is complete.

`key_map` has the names of tensors, `safetensors_folder` the file format, and `families` the supported configurations.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lather.errors import ExchangeError, UserError
from lather.models.decoder import Decoder
from lather.models.entry_names import entry_name, is_stack, split_entry
from lather.models.families import ModelConfig, build_model, config_from_hugging_face, config_to_hugging_face
from lather.models.hf.key_map import HARMLESS, MappedTensor, Shape, published_ways, written_entries
from lather.models.hf.mxfp4 import BLOCK, dequantize_mxfp4
from lather.models.hf.safetensors_folder import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    Index,
    SafetensorsFolder,
    StrPath,
    TensorSource,
    TensorToWrite,
    complete_folder,
    open_published,
    write_safetensors,
)

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
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
HEAD = "lm_head.weight"
MAX_SHARD_BYTES = 5 * 10**9
COMPARED_ELEMENTS = 2**20
"""Number of elements of two tensors that are compared at a time."""


# --- reading ------------------------------------------------------------------------------------------------------------------------


def read_config(folder: StrPath) -> ModelConfig:
    """Read the configuration of a Hugging Face folder.

    Raises ExchangeError if it is missing or damaged, or if it has an unsupported family or field.
    """
    file = Path(folder) / CONFIG_FILE
    mapping = _read_json(file, "give the folder of a model, with config.json and safetensors")
    try:
        return config_from_hugging_face(mapping)
    except (UserError, OverflowError) as error:  # an integer may be too large for a float
        raise ExchangeError(f"{file}: {error}") from None


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return names and shapes of a model's parameters, without allocating them."""
    return {name: tuple(p.shape) for name, p in _on_meta(config).named_parameters()}


@dataclass(frozen=True)
class PublishedWeights:
    """The weights of a Hugging Face folder, whose headers match a model."""

    stored: SafetensorsFolder
    entries: dict[str, list[MappedTensor]]
    """Published tensors of each parameter, in the order of its memory."""
    shapes: dict[str, Shape]

    def pieces(self, parameter: str) -> Iterator[tuple[Index, Tensor]]:
        """Yield the parameter's values in pieces, each with its index in the parameter."""
        for entry in self.entries[parameter]:
            if len(entry.part_shape(self.shapes[parameter])) < 3:
                yield entry.index, self.stored.read(entry.published)
            else:
                yield from (((e,), self.expert(entry, e)) for e in range(self.shapes[parameter][0]))

    def expert(self, entry: MappedTensor, e: int) -> Tensor:
        """Return one expert of a tensor of stacked experts."""
        if entry.is_packed:
            return dequantize_mxfp4(*(self.stored.read(f"{entry.published}_{part}", (e,)) for part in ("blocks", "scales")))
        tensor = self.stored.read(entry.published, (e,))
        return tensor.T if entry.is_transposed else tensor


def _match(folder: Path, model_type: str, shapes: Mapping[str, Shape]) -> PublishedWeights:
    """Compare the headers of a folder with parameters of these shapes."""
    stored = open_published(folder)
    ways = {name: published_ways(model_type, name, shape) for name, shape in shapes.items()}
    entries = {name: _the_way_taken(choices, shapes[name], stored) for name, choices in ways.items()}
    wanted: dict[str, tuple[Shape, bool]] = {}
    for name, taken in entries.items():
        for entry in taken:
            if entry.is_packed and shapes[name][-1] % BLOCK:
                raise ExchangeError(f"{folder}: {entry.published} has rows of {shapes[name][-1]}, not whole MXFP4 blocks: give a bf16 copy")
            published = entry.published_shapes(entry.part_shape(shapes[name]))
            wanted |= {key: (shape, entry.is_packed) for key, shape in published.items()}
    if missing := [key for key in wanted if key not in stored.tensors]:
        raise ExchangeError(f"{folder}: lacks {_first(missing)}, which {CONFIG_FILE} asks for: give the weights that belong to it")
    is_tied = HEAD not in shapes
    surplus = [key for key in stored.tensors if key not in wanted and not _is_harmless(key, stored, is_tied=is_tied)]
    if surplus:
        raise ExchangeError(
            f"{stored.tensors[surplus[0]].file}: has a surplus {_first(surplus)}, which a model of {CONFIG_FILE} does not have: "
            "give the configuration that belongs to it"
        )
    for key, (shape, is_packed) in wanted.items():
        _check_tensor(key, stored, shape, is_packed=is_packed)
    if is_tied and HEAD in stored.tensors:
        _check_tied_head(stored, entries["embed_tokens.weight"][0].published)
    return PublishedWeights(stored, entries, dict(shapes))


def _the_way_taken(choices: list[list[MappedTensor]], shape: Shape, stored: SafetensorsFolder) -> list[MappedTensor]:
    """Return the first format of which the folder has a tensor; the first of all if it has none."""
    for entries in choices:
        names = (name for entry in entries for name in entry.published_shapes(entry.part_shape(shape)))
        if any(name in stored.tensors for name in names):
            return entries
    return choices[0]


def _is_harmless(key: str, stored: SafetensorsFolder, *, is_tied: bool) -> bool:
    is_empty = 0 in stored.tensors[key].shape  # shared experts of a model that has none
    return is_empty or HARMLESS.fullmatch(key) is not None or (is_tied and key == HEAD)


def _check_tensor(key: str, stored: SafetensorsFolder, shape: Shape, *, is_packed: bool) -> None:
    found = stored.tensors[key]
    if found.shape != shape:
        raise ExchangeError(
            f"{found.file}: {key!r} has shape {found.shape}, but {CONFIG_FILE} asks for {shape}: give the configuration that belongs to it"
        )
    if found.dtype not in (("U8",) if is_packed else [name for name, dtype in DTYPES.items() if dtype.is_floating_point]):
        raise ExchangeError(f"{found.file}: {key!r} is of dtype {found.dtype}, which is not supported: give a copy in BF16, F16 or F32")


def _check_tied_head(stored: SafetensorsFolder, embedding: str) -> None:
    """Check that a published head that is tied to the embedding has the same values."""
    rows, columns = stored.tensors[embedding].shape
    _check_tensor(HEAD, stored, (rows, columns), is_packed=False)
    step = max(1, COMPARED_ELEMENTS // columns)
    for start in range(0, rows, step):
        at = (slice(start, min(start + step, rows)),)
        one, other = (stored.read(name, at).double() for name in (HEAD, embedding))
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            raise ExchangeError(
                f"{stored.tensors[HEAD].file}: {HEAD!r} differs from {embedding!r}, but {CONFIG_FILE} makes them one: set its "
                f"tie_word_embeddings to false, or remove {HEAD!r} if it does not belong to the model"
            )


def _first(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _read_json(file: Path, remedy: str) -> dict[str, Any]:
    try:
        mapping = json.loads(file.read_text("utf-8"))
        if not isinstance(mapping, dict):
            raise ValueError("not a JSON object")
        return mapping
    except (OSError, ValueError, RecursionError) as error:
        raise ExchangeError(f"{file}: missing or damaged ({error}): {remedy}") from None


def open_hugging_face(folder: StrPath) -> tuple[PublishedWeights, ModelConfig]:
    """Open the weights of a Hugging Face folder, check that they match its configuration, and return both.

    Raises ExchangeError, with the file and the field or tensor, if anything is missing, damaged, surplus or not supported, or if a head
    differs from the embedding that it is tied to.
    """
    config = read_config(folder)
    return _match(Path(folder), config.model_type, parameter_shapes(config)), config


def load_hugging_face(folder: StrPath, model: nn.Module) -> None:
    """Set a model's parameters to the folder's weights, which may have any floating dtype.

    If the folder cannot be read, or does not hold exactly the model's parameters, this raises ExchangeError and changes nothing.
    """
    weights, _ = open_hugging_face(folder)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if different := sorted({name for name in {**shapes, **weights.shapes} if shapes.get(name) != weights.shapes.get(name)}):
        found, given = (shape.get(different[0], "absent") for shape in (weights.shapes, shapes))
        raise ExchangeError(
            f"{folder}: holds another model: {different[0]} is {found} there and {given} here: build the model from its {CONFIG_FILE}"
        )
    _fill(model, weights)


def model_from_hugging_face(
    folder: StrPath, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[Decoder, ModelConfig]:
    """Load the model in a Hugging Face folder; return it and its configuration.

    `dtype` None: the stored dtype of the embedding. If the folder cannot be read, ExchangeError is raised before memory is allocated.
    """
    weights, config = open_hugging_face(folder)
    stored = weights.stored.tensors[weights.entries["embed_tokens.weight"][0].published].dtype
    model = _on_meta(config)
    _materialize(model, dtype or DTYPES[stored], device or torch.device("cpu"))
    _fill(model, weights)
    return model, config


@torch.no_grad()
def _fill(model: nn.Module, weights: PublishedWeights) -> None:
    for name, p in model.named_parameters():
        for index, piece in weights.pieces(name):
            p[index].copy_(piece)


def _on_meta(config: ModelConfig) -> Decoder:
    return build_model(config, torch.Generator(), torch.device("meta"))


def _materialize(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate the memory of a model that is on the meta device. Shared parameters stay shared; buffers are zero."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            made.setdefault(id(p), nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device), p.requires_grad))
            setattr(module, name, made[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def copy_weights(weights: PublishedWeights, file: StrPath) -> None:
    """Write the weights in fp32 to one safetensors file, under Lather's names, with one entry per expert."""
    tensors = []
    for name, shape in weights.shapes.items():
        if is_stack(name):
            tensors += [TensorToWrite(entry_name(name, e), torch.float32, shape[1:]) for e in range(shape[0])]
        else:
            tensors.append(TensorToWrite(name, torch.float32, shape))
    stacks: dict[str, Iterator[tuple[int, Iterator[tuple[int, Tensor]]]]] = {}

    def values(name: str) -> Iterator[Tensor]:
        """Yield the values of an entry; the experts of a stack must be requested in order."""
        stack, expert = split_entry(name)
        if expert is None:
            yield from (piece for _, piece in weights.pieces(name))
            return
        if expert == 0:
            stacks[stack] = itertools.groupby(_by_expert(weights.pieces(stack)), key=itemgetter(0))
        number, parts = next(stacks[stack])
        assert number == expert
        yield from (part for _, part in parts)

    write_safetensors(Path(file), tensors, values)


def _by_expert(pieces: Iterator[tuple[Index, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    for index, piece in pieces:
        if index:
            assert isinstance(index[0], int)
            yield index[0], piece
        else:
            yield from enumerate(piece)


# --- writing ------------------------------------------------------------------------------------------------------------------------


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
            f"{_first(biases)} of loss-free balancing cannot be exported: published models of this family have no such bias and would "
            "route differently: train with moe.bias_update_rate = 0 to export"
        )
    if different := sorted(name for name in {**expected, **found} if found.get(name) != expected.get(name)):
        raise ExchangeError(
            f"{_first(different)} of the weights does not match the configuration: give the one that they were trained with"
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
        before = _read_json(original, "restore it, or delete it") if original.exists() else {}
        return {key: before[key] for key in TOKEN_IDS if key in before}
    content = _read_json(tokenizer, "give another tokenizer")
    shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
    special = [token for token in content.get("added_tokens", []) if token["special"]]
    ends = special[0] if len(special) == 1 else None  # the only special token of Lather's own tokenizers ends a document
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | ({"eos_token": ends["content"]} if ends else {}))
    return {"bos_token_id": None, "eos_token_id": ends["id"] if ends else None}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
