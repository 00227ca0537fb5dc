"""Who writes and who reads what, for torch's distributed checkpoints: planners over pieces of tensors of the whole model.

A piece that several ranks have (replicas, step counters) is written by one of them, the one with the least to write so far, so that equal
copies are spread evenly. Plans are the same for the same mesh. What is read is planned by torch: the overlaps of the boxes that were
written with those that are wanted.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lather.checkpoint.table import check_cover


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the whole model."""

    name: str
    """Of the tensor."""
    value: Tensor
    """A view of what the run works with: copying into it loads it."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, self.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.value.shape)

    @property
    def counts(self) -> bool:
        """Whether it has elements, or its tensor has none."""
        return self.value.numel() > 0 or tuple(self.value.shape) == self.shape


Stage = Callable[[Mapping[MetadataIndex, Tensor]], Mapping[MetadataIndex, Tensor]]
"""Is given what this rank is to write, and returns what is written in its place."""


class PieceSavePlanner(SavePlanner):
    """Saves pieces."""

    def __init__(self, pieces: Iterable[Piece], stage: Stage | None = None) -> None:
        self._pieces = {piece.index: piece for piece in pieces if piece.counts}
        self._stage = stage
        self._own: Mapping[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """The pieces are known already; a dict by name could not have several of one tensor."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._pieces.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = [replace(plan, items=items) for plan, items in zip(all_plans, each_once([plan.items for plan in all_plans]), strict=True)]
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in sorted((item for plan in plans for item in plan.items), key=_place):
            data = _tensor_data(item)
            known = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            assert (known.size, known.properties.dtype) == (data.size, data.properties.dtype), item.index
            known.chunks.append(data.chunk)
        for name, tensor in tensors.items():
            check_cover(name, tensor.size, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks])
        return plans, Metadata({**tensors})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        own = {item.index: self._pieces[item.index].value for item in new_plan.items}
        self._own = own if self._stage is None else self._stage(own)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._own[write_item.index]


def each_once(plans: list[list[WriteItem]]) -> list[list[WriteItem]]:
    """What each rank writes when of equal pieces only one is written: by the rank that has the least to write until then, the largest
    pieces first."""
    havers: defaultdict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            havers[item.index].append(rank)
            known = items.setdefault(item.index, item)
            assert _tensor_data(known) == _tensor_data(item), f"ranks differ in what {item.index.fqn} is"
    load, chosen = [0] * len(plans), [[] for _ in plans]  # type: list[int], list[list[WriteItem]]
    for item in sorted(items.values(), key=lambda item: (len(havers[item.index]) > 1, -_num_bytes(item), _place(item))):
        rank = min(havers[item.index], key=lambda rank: (load[rank], rank))
        load[rank] += _num_bytes(item)
        chosen[rank].append(item)
    return chosen


class PieceLoadPlanner(LoadPlanner):
    """Loads into pieces, in place. All must be in the checkpoint."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = {piece.index: piece for piece in pieces if piece.value.numel()}
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for piece in self._pieces.values():
            stored = self._metadata.state_dict_metadata[piece.name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(piece.name, stored, [piece.chunk])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        value = self._pieces[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)].value
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            value = value.narrow(dim, start, length)
        return value

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is a view of the piece."""


def _write_item(piece: Piece) -> WriteItem:
    data = TensorWriteData(piece.chunk, TensorProperties(dtype=piece.value.dtype), torch.Size(piece.shape))
    return WriteItem(piece.index, WriteItemType.SHARD, tensor_data=data)


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _num_bytes(item: WriteItem) -> int:
    data = _tensor_data(item)
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _place(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())
