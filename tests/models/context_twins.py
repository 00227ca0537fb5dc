"""Two context ranks in one process, with the same tokens, and blocks that run on one of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lather.models.block import Block
from lather.models.context import Context
from lather.models.pending import Pending
from lather.models.token_positions import SequenceLayout
from lather.pipeline.chunk import ChunkTape, MicroBatch


@dataclass(frozen=True)
class Twins(Context):
    """Two context ranks that have the same tokens, and what was gathered so far."""

    gathered: list[weakref.ref[Any]] = field(default_factory=list)

    def start_gather(self, tensors: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        whole = tuple(torch.cat((x, x), dim=1) for x in tensors)
        self.gathered.extend(weakref.ref(x.untyped_storage()) for x in whole)
        return Pending(lambda: whole)

    def start_sum(self, grads: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        return Pending(lambda: tuple(sum(x.chunk(2, dim=1)) for x in grads))


def stops(chunk: Any) -> tuple[int, Any]:
    """Run a chunk; return how often it stopped, and its result."""
    number = 0
    while True:
        try:
            next(chunk)
        except StopIteration as end:
            return number, end.value
        number += 1


def tape_of(layout: SequenceLayout) -> ChunkTape:
    tokens_BS = torch.zeros(2, 8, dtype=torch.long)
    return ChunkTape(MicroBatch(tokens_BS, tokens_BS, layout))


def input_of(block: Block) -> Tensor:
    return torch.randn(
        2, 8, len(block.input_layernorm.weight), generator=torch.Generator().manual_seed(1)
    )
