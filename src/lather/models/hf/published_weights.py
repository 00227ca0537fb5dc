"""The weights of a Hugging Face folder, and their comparison with a model: names, shapes and dtypes
in all headers, and the values of a head with those of the embedding that it is tied to.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lather.errors import ExchangeError
from lather.hub import CONFIG_FILE
from lather.models.entry_names import entry_shapes, split_entry
from lather.models.family import Family
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
from lather.models.hf.safetensors_folder import open_published
from lather.safetensors_file import DTYPES, Index, SafetensorsFiles, TensorHeader

LAYER = re.compile(r".*layers\.\d+\.")
FP8_DTYPE = "F8_E4M3"
COMPARED_ELEMENTS = 2**20
"""Number of elements of two tensors that are compared at a time."""


@dataclass(frozen=True)
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


def match_headers(folder: Path, family: Family, shapes: Mapping[str, Shape]) -> PublishedWeights:
    """Compare the headers of a folder with the weights of its model, which have these shapes."""
    stored = open_published(folder)
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
