"""The state of a training run, as a rank has it and as the whole model's.

On a mesh a rank has some layers, of these some experts, and of each parameter some rows. A checkpoint knows nothing of that: it has whole
tensors under the names of the whole model. `gather` puts them together on rank 0, one at a time; `load` takes a rank's rows out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lather.parallel.local import LocalParameters, ShardInfo

if TYPE_CHECKING:
    from lather.train.engine import Engine

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor of the whole model."""

    name: str
    value: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: int = 0
    """Of the first row."""
    is_copy: bool = False
    """Another rank has the same rows and saves them."""

    @property
    def are_all(self) -> bool:
        return tuple(self.value.shape) == self.shape

    def of(self, whole: Tensor) -> Tensor:
        """These rows of another tensor of the whole model."""
        return whole if self.are_all else whole[self.offset : self.offset + len(self.value)]


@dataclass(frozen=True)
class _Owned:
    """A parameter as the optimizer knows it."""

    info: ShardInfo
    parameter: nn.Parameter


class TrainingState:
    """Weights, buffers and optimizer state of this rank; for saving and loading."""

    def __init__(self, owned: Iterable[_Owned], buffers: Iterable[Rows], optimizer: torch.optim.Optimizer | None, num_ranks: int) -> None:
        self._owned, self._buffers = list(owned), list(buffers)
        self.optimizer, self.num_ranks = optimizer, num_ranks

    @classmethod
    def of_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Of a whole model in one process."""
        owned = [_Owned(ShardInfo(name, False, tuple(p.shape), 0, len(p)), p) for name, p in model.named_parameters()]
        return cls(owned, _buffers(model), optimizer, 1)

    @classmethod
    def of_engine(cls, engine: Engine, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Of this rank of a mesh; every rank makes one."""
        parameters: LocalParameters = engine.parameters
        owned = [_Owned(entry.info, entry.parameter) for entry in parameters]
        return cls(owned, _buffers(engine.part, is_copy=engine.mesh.data_rank > 0), optimizer, engine.mesh.size)

    def weights(self) -> Iterator[Rows]:
        """Parameters by name, tied ones once, and buffers that are part of the state."""
        for owned in self._owned:
            yield _rows(owned.info, owned.info.name, owned.parameter.detach())
        yield from self._buffers

    def parameters(self) -> Iterator[Rows]:
        return (rows for rows in self.weights() if not any(rows is buffer for buffer in self._buffers))

    def optimizer_state(self) -> Iterator[Rows]:
        """By `<parameter name>/<key>`, every entry a tensor."""
        state = {} if self.optimizer is None else self.optimizer.state
        for owned in self._owned:
            for key, value in state.get(owned.parameter, {}).items():
                yield _rows(owned.info, f"{owned.info.name}/{key}", torch.as_tensor(value))

    def gather(self) -> tuple[Tensors, Tensors] | None:
        """Whole weights and whole optimizer state on CPU, on rank 0; None elsewhere. Every rank of the mesh calls it."""
        weights, state = (_whole(list(rows), self.num_ranks) for rows in (self.weights(), self.optimizer_state()))
        return None if weights is None or state is None else (weights, state)

    @torch.no_grad()
    def load_weights(self, whole: Mapping[str, Tensor]) -> None:
        for rows in self.weights():
            if rows.name in whole:
                rows.value.copy_(rows.of(whole[rows.name]))

    def load_optimizer_state(self, whole: Mapping[str, Mapping[str, Tensor]]) -> None:
        """From entries by parameter name and key; parameters that have none start afresh."""
        assert self.optimizer is not None
        state_dict = self.optimizer.state_dict()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        infos = {owned.parameter: owned.info for owned in self._owned}
        state: dict[int, dict[str, Any]] = {}
        for index, p in zip(ids, params, strict=True):
            if entries := whole.get(infos[p].name):
                state[index] = {key: _own_rows(infos[p], x, x.device if key == "step" else p.device) for key, x in entries.items()}
        state_dict["state"] = state
        self.optimizer.load_state_dict(state_dict)


def _buffers(module: nn.Module, *, is_copy: bool = False) -> list[Rows]:
    kept = module.state_dict().keys()
    return [Rows(name, x, tuple(x.shape), is_copy=is_copy) for name, x in module.named_buffers() if name in kept]


def _rows(info: ShardInfo, name: str, value: Tensor) -> Rows:
    """What belongs to a parameter: as many rows as it has here, or something that is not divided."""
    divided = info.length != info.shape[0] and value.dim() > 0 and len(value) == info.length
    shape = (info.shape[0], *value.shape[1:]) if divided else tuple(value.shape)
    is_copy = info.replica > 0 or info.is_empty or (not divided and info.offset > 0)
    return Rows(name, value, shape, info.offset if divided else 0, is_copy)


def _own_rows(info: ShardInfo, whole: Tensor, device: torch.device) -> Tensor:
    divided = info.length != info.shape[0] and whole.dim() > 0 and len(whole) == info.shape[0]
    return (whole[info.offset : info.offset + info.length] if divided else whole).to(device, copy=True)


def _whole(rows: list[Rows], num_ranks: int) -> Tensors | None:
    """Rank by rank and tensor by tensor to rank 0, on CPU."""
    if num_ranks == 1:
        return {own.name: own.value.contiguous() for own in rows}
    own = [each for each in rows if not each.is_copy]
    outlines: list[Any] = [None] * num_ranks
    dist.all_gather_object(outlines, [(each.name, each.shape, each.offset, tuple(each.value.shape), each.value.dtype) for each in own])
    if dist.get_rank() > 0:
        for each in own:
            dist.send(each.value.cpu().contiguous(), 0)
        return None
    whole: Tensors = {}
    for rank, outline in enumerate(outlines):
        for number, (name, shape, offset, own_shape, dtype) in enumerate(outline):
            part = own[number].value.cpu() if rank == 0 else torch.empty(own_shape, dtype=dtype)
            if rank > 0:
                dist.recv(part, rank)
            if own_shape == shape:
                whole[name] = part.contiguous()
                continue
            whole.setdefault(name, torch.empty(shape, dtype=dtype))[offset : offset + len(part)] = part
    return whole
