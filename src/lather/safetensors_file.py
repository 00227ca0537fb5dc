"""Reads and writes safetensors files, tensors or parts of them at a time.

Source: the safetensors format: eight bytes with the length of the header (little-endian), the
header in JSON (name, dtype, shape and offsets of each tensor), then the bytes of the tensors
without gaps. The library checks headers, but it can write only tensors that are all in memory, so
this module writes files itself.
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
from lather.files import StrPath

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Supported dtypes; U8, I8 and F8_E4M3 hold numbers that are not used as they are."""
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


class SafetensorsFiles:
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
    """Tensors that are read on demand, such as those of a `SafetensorsFiles`."""

    @property
    def tensors(self) -> Mapping[str, TensorHeader]: ...

    def read(self, name: str, index: Index = ()) -> Tensor: ...


def open_safetensors(file: StrPath) -> SafetensorsFiles:
    """Open one file. Raises ExchangeError if it is missing, truncated or damaged."""
    return SafetensorsFiles(read_header(Path(file)))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header, which the library has checked; the library does not return the offsets. (For
    torch it would map the file as memory of the process.)"""
    try:
        with file.open("rb") as content, safe_open(file, framework="np"):
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
        TensorToWrite(name, torch.float32, header.shape, map(weights.read, [name]))
        for name, header in weights.tensors.items()
    ]
    write_safetensors(Path(file), tensors)
