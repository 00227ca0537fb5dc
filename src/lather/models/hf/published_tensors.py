"""The weights of a Hugging Face folder, read on demand like those of a checkpoint: under Lather's names, one entry per expert."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lather.models.entry_names import entry_name, is_stack, split_entry
from lather.models.hf.key_map import MappedTensor
from lather.models.hf.model_folder import PublishedWeights
from lather.models.hf.safetensors_folder import DescribedTensor, Index, StrPath, TensorToWrite, write_safetensors


@dataclass(frozen=True)
class _Described:
    dtype: str
    shape: tuple[int, ...]


class PublishedTensors:
    """The weights of a Hugging Face folder under Lather's names, with one entry per expert."""

    def __init__(self, weights: PublishedWeights) -> None:
        self._weights = weights
        self._of_expert: defaultdict[tuple[str, int], list[MappedTensor]] = defaultdict(list)
        for stack, entries in weights.entries.items():
            for entry in entries:
                if entry.index:
                    assert isinstance(entry.index[0], int)
                    self._of_expert[stack, entry.index[0]].append(entry)

    @property
    def tensors(self) -> Mapping[str, DescribedTensor]:
        found: dict[str, DescribedTensor] = {}
        for name, shape in self._weights.shapes.items():
            if is_stack(name):
                found |= {entry_name(name, expert): _Described("F32", shape[1:]) for expert in range(shape[0])}
            else:
                found[name] = _Described("F32", shape)
        return found

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return `tensor[index]` on CPU, in its published dtype; for an expert the whole matrix is read."""
        parameter, expert = split_entry(name)
        if expert is None:
            (entry,) = self._weights.entries[parameter]
            return self._weights.stored.read(entry.published, index)
        if parts := self._of_expert[parameter, expert]:
            return torch.cat([self._weights.stored.read(part.published) for part in parts])[index]
        (entry,) = self._weights.entries[parameter]
        return self._weights.expert(entry, expert)[index]


def copy_weights(weights: PublishedWeights, file: StrPath) -> None:
    """Write the weights in fp32 to one safetensors file, under Lather's names, with one entry per expert."""
    source = PublishedTensors(weights)
    tensors = [TensorToWrite(name, torch.float32, described.shape) for name, described in source.tensors.items()]
    write_safetensors(Path(file), tensors, lambda name: [source.read(name)])
