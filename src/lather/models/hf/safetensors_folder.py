"""Reads and writes safetensors files in pieces, and the shards of Hugging Face folders.

Source: the safetensors format: eight bytes with the length of the header (little-endian), the
header in JSON (name, dtype, shape and offsets of each tensor), then the bytes of the tensors
without gaps. The library checks headers, but it can write only tensors that are all in memory, so
this module writes files itself.

Tensors, or parts of them, are read only on demand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lather.errors import ExchangeError
from lather.files import StrPath, read_text, write_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}
"""Supported dtypes of weights; U8 holds packed weights."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ANOTHER_COPY = "download or save it again"

Index = tuple[int | slice, ...]
"""Index of a part of a tensor."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor that has not been read, as the header of a file describes it."""

    dtype: str
    """Name of the dtype: F32, BF16, ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor(TensorHeader):
    """A tensor in a file."""

    file: Path
    start: int
    """Offset of its first byte in the file."""


class SafetensorsFolder:
    """The tensors of one or more safetensors files; headers have been checked, values are read on
    demand."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = dict(tensors)

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Read `tensor[index]`, which must be contiguous in the file, and return it on CPU; only
        this part is read.

        The file is not memory-mapped, because mapped pages would count as memory of the process.
        Raises ExchangeError if the file has changed since its header was checked.
        """
        stored = self.tensors[name]
        part = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")[index]
        assert part.is_contiguous(), (name, index)
        if part.numel() == 0:
            return torch.empty(part.shape, dtype=part.dtype, device="cpu")
        content = bytearray(part.nbytes)
        try:
            with stored.file.open("rb") as file:
                file.seek(stored.start + int(part.storage_offset()) * part.itemsize)
                if file.readinto(content) != part.nbytes:
                    raise ExchangeError(
                        f"{stored.file}: was truncated while it was read: {ANOTHER_COPY}"
                    )
        except OSError as error:
            raise ExchangeError(
                f"{stored.file}: has become unreadable ({error.strerror}): {ANOTHER_COPY}"
            ) from None
        return torch.frombuffer(content, dtype=part.dtype).view(part.shape)


@runtime_checkable
class TensorSource(Protocol):
    """Tensors that are read on demand, such as those of a `SafetensorsFolder`."""

    @property
    def tensors(self) -> Mapping[str, TensorHeader]: ...

    def read(self, name: str, index: Index = ()) -> Tensor: ...


def open_safetensors(file: StrPath) -> SafetensorsFolder:
    """Open one file. Raises ExchangeError if it is missing, truncated or damaged."""
    return SafetensorsFolder(_read_header(Path(file)))


def open_published(folder: Path) -> SafetensorsFolder:
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
    weight_map = _read_index(index)
    headers = {name: _read_header(folder / name) for name in dict.fromkeys(weight_map.values())}
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
    return SafetensorsFolder({name: headers[file][name] for name, file in weight_map.items()})


def _read_index(index: Path) -> dict[str, str]:
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
        if not (index.parent / file).is_file():
            raise ExchangeError(
                f"{index}: places {name!r} in {file}, which is missing: {ANOTHER_COPY}"
            )
    return weight_map


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header, which the library has checked; the library does not return the offsets."""
    try:
        with safe_open(file, framework="pt"), file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
        header.pop("__metadata__", None)
        return {
            name: StoredTensor(
                entry["dtype"], tuple(entry["shape"]), file, 8 + length + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }
    except (SafetensorError, OSError, ValueError) as error:
        raise ExchangeError(
            f"{file}: missing, truncated or damaged ({error}): {ANOTHER_COPY}"
        ) from None


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor that will be written to a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]
    """The values in the order of memory, on any device and of any floating dtype. They are read
    when the tensor is written, once, and one piece is in memory at a time."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    file: Path, tensors: Iterable[TensorToWrite], hashed: Callable[[Any], object] | None = None
) -> None:
    """Write a file, and sync it to disk. `hashed` gets all bytes, in order."""
    # so that every tensor is aligned without gaps
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:

        def write(data: Any) -> None:
            out.write(data)
            if hashed is not None:
                hashed(data)

        write(len(encoded).to_bytes(8, "little"))
        write(encoded)
        for tensor in ordered:
            before = out.tell()
            for piece in tensor.pieces:
                flat = piece.detach().to("cpu", tensor.dtype).contiguous().flatten()
                write(flat.view(torch.uint8).numpy().data)
            assert out.tell() - before == tensor.num_bytes, tensor.name
        out.flush()
        os.fsync(out.fileno())


def copy_weights(weights: TensorSource, file: StrPath) -> None:
    """Write the tensors in fp32 to one file."""
    tensors = [
        TensorToWrite(name, torch.float32, one.shape, map(weights.read, [name]))
        for name, one in weights.tensors.items()
    ]
    write_safetensors(Path(file), tensors)


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
