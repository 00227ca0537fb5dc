"""The weights of a live engine as published tensors, one at a time, without a copy on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import Box, Piece, PieceKey
from lather.checkpoint.state import TrainingState
from lather.config.config import Config
from lather.engine.engine import Engine
from lather.models.adapted import MergedTensors
from lather.models.hf.model_export import published_tensors
from lather.parallel.agreement import broadcast, gather
from lather.safetensors_file import DTYPE_NAMES, Index, TensorHeader


@torch.no_grad()
def live_weights(
    engine: Engine, config: Config, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values that `lather export` would write: under the names of Hugging Face,
    on the engine's device, with adapters merged. `config`: of the run.

    Collective: all ranks of the mesh iterate to the end, between steps, and each gets every tensor,
    which is gathered from the ranks that have its rows, experts or layers. A tensor is yielded
    once, and three of Lather's are in memory besides it at most.

    Args:
        dtype: of the values, except for the biases that only choose experts; None: fp32 or wider.

    Raises ExchangeError, on all ranks, if published models of the family cannot express the model.
    """
    merged = MergedTensors(LiveTensors(engine), config.lora.scale)
    yield from published_tensors(merged, config.model, dtype)


class LiveTensors:
    """The parameters and buffers of an engine, an entry per expert, gathered when they are read.
    All ranks construct it, and read the same entries in the same order."""

    def __init__(self, engine: Engine) -> None:
        self._mesh = mesh = engine.mesh
        state = TrainingState(engine.parameters, engine.part, None, mesh)
        own = [piece for piece in state.weights() if piece.is_stored]
        self._values: dict[PieceKey, Tensor] = {piece.key: piece.value for piece in own}
        described = gather([piece.described() for piece in own], mesh.control_group)
        self._pieces: dict[str, dict[tuple[int, ...], tuple[int, Piece]]] = {}
        """The pieces of each entry by offset, with the first rank that has it."""
        for rank, pieces in enumerate(broadcast(described, mesh.control_group)):
            for piece in pieces:
                self._pieces.setdefault(piece.name, {}).setdefault(piece.offset, (rank, piece))
        # the halves of an expert's gate and up, and the factors of its adapter
        self._gathered = lru_cache(3)(self._gather)

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        return {
            name: TensorHeader(DTYPE_NAMES[_wide(piece.value.dtype)], piece.shape)
            for name, pieces in self._pieces.items()
            for _, piece in [next(iter(pieces.values()))]
        }

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return a copy, in fp32 or wider."""
        tensor = self._gathered(name)
        return tensor[index].to(_wide(tensor.dtype), copy=True)

    def _gather(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        _, first = next(iter(pieces.values()))
        device = self._mesh.device
        whole = torch.empty(first.shape, dtype=first.value.dtype, device=device)
        everything = Box((0,) * whole.dim(), first.shape)
        for offset, (rank, piece) in sorted(pieces.items()):
            rows = whole[piece.box.within(everything)]
            if rank == self._mesh.rank:
                rows.copy_(self._values[name, offset])
            if self._mesh.size > 1:
                dist.broadcast(rows, rank)
        return whole


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
