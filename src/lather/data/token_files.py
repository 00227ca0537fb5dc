"""Token files that other programs have written.

    Megatron    NAME.bin and NAME.idx: sequences of any integer type, and an index of their lengths
                (Megatron-LM's `indexed_dataset.py`)
    llm.c       NAME.bin that begins with 256 int32: 20240520 and version 1 (uint16) or 20240801 and
                version 7 (uint32), number of tokens
    datatrove   NAME.ds and NAME.ds.index: uint16 or uint32, and where documents end (uint64)
    bare        any other NAME.bin: uint16 or uint32 without a header, as nanoGPT writes
    numpy       NAME.npy, a flat array of integers

Documents end where the index says; without an index, after each end-of-text token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lather.data.shards import Array

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
LLM_C_HEADER = 256 * 4
BLOCK_TOKENS = 1 << 20


class TokenFileError(Exception):
    """The file holds no tokens that can be read; the message says why."""


@dataclass(frozen=True)
class TokenFile:
    """The place and type of the tokens in a file."""

    path: Path
    dtype: str
    offset: int
    length: int
    """Number of tokens."""
    ends: Array | None = None
    """The place after each document's last token; None: documents end after each end-of-text
    token."""

    def blocks(self, end: int | None) -> Iterator[tuple[Array, Array]]:
        """Yield the tokens in blocks, each with the places in the block after which documents
        end."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.length, BLOCK_TOKENS):
                count = min(BLOCK_TOKENS, self.length - start)
                tokens = np.fromfile(file, self.dtype, count)
                if len(tokens) != count:
                    have = f"{start + len(tokens):,} of {self.length:,}"
                    raise TokenFileError(f"ends after {have} tokens")
                if self.ends is not None:
                    first, last = np.searchsorted(self.ends, [start, start + count], side="right")
                    yield tokens, self.ends[first:last] - start
                else:  # no token equals None
                    yield tokens, np.flatnonzero(tokens == end) + 1


def open_token_file(path: Path, bare_dtype: str = "") -> TokenFile:
    """Recognize the format and find the tokens. `bare_dtype`: "uint16" or "uint32", for a .bin
    without a header. Raises TokenFileError."""
    size = path.stat().st_size
    if path.suffix == ".npy":
        return _numpy(path)
    if path.suffix == ".ds":
        return _datatrove(path, size)
    if path.suffix == ".idx":
        indexed = path.with_suffix(".bin")
        fault = f": give {indexed.name}" if indexed.exists() else f", but {indexed.name} is missing"
        raise TokenFileError(f"an index{fault}")
    if path.with_suffix(".idx").exists():
        return _megatron(path, size)
    header = np.fromfile(path, "<i4", 3).tolist()
    if size >= LLM_C_HEADER and (dtype := LLM_C.get((header[0], header[1]))):
        return _of_length(path, dtype, LLM_C_HEADER, header[2], size)
    if not bare_dtype:
        raise TokenFileError(
            "no header says how its tokens are stored: give --token-dtype uint16 or uint32"
        )
    dtype = {"uint16": "<u2", "uint32": "<u4"}[bare_dtype]
    return _of_length(path, dtype, 0, size // np.dtype(dtype).itemsize, size)


def _of_length(path: Path, dtype: str, offset: int, length: int, size: int) -> TokenFile:
    expected = offset + length * np.dtype(dtype).itemsize
    if size != expected:
        raise TokenFileError(f"has {size:,} bytes, not {expected:,} for its {length:,} tokens")
    return TokenFile(path, dtype, offset, length)


def _numpy(path: Path) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy's reader raises errors of many types for damaged files
        raise TokenFileError(f"not a numpy array ({error})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenFileError(f"holds {array.shape} {array.dtype}, not a flat array of integers")
    return TokenFile(path, array.dtype.str, array.offset, len(array))


def _datatrove(path: Path, size: int) -> TokenFile:
    index, mask = (path.with_name(path.name + suffix) for suffix in (".index", ".loss"))
    if mask.exists():
        raise TokenFileError(
            f"{mask.name} says which tokens are trained on, but Lather cannot read it"
        )
    if not index.exists():
        raise TokenFileError(f"{index.name}, the index of its documents, is missing")
    content = index.read_bytes()
    ends = np.frombuffer(content[: len(content) // 8 * 8], "<u8").astype(np.int64)
    length = int(ends[-1]) if len(ends) else 0
    if (
        len(content) % 8
        or (np.diff(ends, prepend=0) < 0).any()
        or size not in (2 * length, 4 * length)
    ):
        raise TokenFileError(f"{index.name} does not match its {size:,} bytes")
    return TokenFile(path, "<u2" if size == 2 * length else "<u4", 0, length, np.unique(ends))


def _megatron(path: Path, size: int) -> TokenFile:
    file = path.with_suffix(".idx")
    index, name = file.read_bytes(), file.name
    if not index.startswith(MEGATRON_MAGIC) or len(index) < 34:
        raise TokenFileError(f"{name} is not a Megatron index")
    _, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", index)
    dtype = MEGATRON_DTYPES.get(code, "f4")
    if version != 1 or np.dtype(dtype).kind not in "iu":
        fault = f"has version {version} and type {code}: not version 1 of integers"
        raise TokenFileError(f"{name} {fault}")
    expected = 34 + sequences * 12 + documents * 8
    if len(index) < expected:
        fault = f"has {len(index):,} bytes, not {expected:,} for {sequences:,} sequences"
        raise TokenFileError(f"{name} {fault}")
    lengths = np.frombuffer(index, "<i4", sequences, 34).astype(np.int64)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    # numbers of sequences, from 0
    borders = np.frombuffer(index, "<i8", documents, 34 + 12 * sequences)
    stops = np.cumsum(lengths)
    if sequences and not np.array_equal(pointers, (stops - lengths) * np.dtype(dtype).itemsize):
        raise TokenFileError("its sequences do not follow each other")
    if documents and (borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any()):
        fault = f"has documents that do not match its {sequences:,} sequences"
        raise TokenFileError(f"{name} {fault}")
    tokens = _of_length(path, dtype, 0, int(stops[-1]) if sequences else 0, size)
    ends = stops[borders[1:] - 1] if documents > 1 and sequences else stops
    return replace(tokens, ends=np.unique(ends))
