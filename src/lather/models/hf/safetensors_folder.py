"""Reads and writes the weights of Hugging Face folders: one safetensors file, or shards with an
index."""

from __future__ import annotations

import json
from pathlib import Path

from lather.errors import ExchangeError
from lather.files import read_text, write_json
from lather.safetensors_file import (
    ANOTHER_COPY,
    SafetensorsFiles,
    TensorToWrite,
    open_safetensors,
    read_header,
    write_safetensors,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_published(folder: Path) -> SafetensorsFiles:
    """Open the weights of a Hugging Face folder: `model.safetensors`, or the shards that
    `model.safetensors.index.json` lists.

    Raises ExchangeError if there are no weights, if the index names a file that is missing, is
    outside the folder or lacks a tensor, or if a file is truncated or damaged. Pickled weights
    (`pytorch_model.bin`) are never opened.
    """
    if (folder / SINGLE_FILE).exists():
        return open_safetensors(folder / SINGLE_FILE)
    index = folder / INDEX_FILE
    if not index.exists():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ExchangeError(
                f"{folder / pickles[0]}: pickled weights are refused, since loading them can run "
                "any code: save the model as safetensors "
                "(transformers' save_pretrained does) and give that folder"
            )
        raise ExchangeError(
            f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}: give a folder with weights "
            "in safetensors"
        )
    weight_map = read_index(index)
    for name, file in weight_map.items():
        if not (folder / file).is_file():
            raise ExchangeError(
                f"{index}: places {name!r} in {file}, which is missing: {ANOTHER_COPY}"
            )
    headers = {name: read_header(folder / name) for name in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ExchangeError(
                f"{index}: places {name!r} in {file}, which does not hold it: {ANOTHER_COPY}"
            )
    for file, header in headers.items():
        if surplus := [name for name in header if weight_map.get(name) != file]:
            raise ExchangeError(
                f"{folder / file}: holds {surplus[0]!r}, which {INDEX_FILE} does not place there: "
                f"{ANOTHER_COPY}"
            )
    return SafetensorsFiles({name: headers[file][name] for name, file in weight_map.items()})


def read_index(index: Path) -> dict[str, str]:
    """Read which file beside an index has each tensor. Raises ExchangeError if it is damaged, or
    names a file elsewhere."""
    try:
        weight_map = json.loads(read_text(index))["weight_map"]
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise ValueError("its weight_map does not give a file name to each tensor")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExchangeError(f"{index}: not a usable index ({error}): {ANOTHER_COPY}") from None
    for name, file in weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ExchangeError(
                f"{index}: places {name!r} in {file!r}, which is not a .safetensors file beside "
                f"it: {ANOTHER_COPY}"
            )
    return weight_map


def write_published(folder: Path, tensors: list[TensorToWrite], max_shard_bytes: int) -> None:
    """Write the weights of a Hugging Face folder: one file, or shards with an index if that is
    larger than `max_shard_bytes`."""
    shards = _shards(tensors, max_shard_bytes)
    for file, shard in shards.items():
        write_safetensors(folder / file, shard)
    if list(shards) != [SINGLE_FILE]:
        size = sum(tensor.num_bytes for tensor in tensors)
        weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
        write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map}
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
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }
