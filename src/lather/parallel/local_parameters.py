"""This rank's rows of every parameter, as plain parameters for elementwise optimizers and as DTensors for those that need whole matrices.

A sharded parameter has its dim 0 split over ranks: rows of a matrix, or whole experts of a stack. Where dim 0 has fewer rows than there
are ranks, some ranks have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lather.models.experts import Experts
from lather.optim.sharded.placement import chunk
from lather.parallel.fsdp_units import is_shared
from lather.parallel.mesh import Mesh


@dataclass(frozen=True)
class ShardInfo:
    """Which part of a parameter of the whole model a rank has."""

    name: str
    """In the whole model."""
    is_expert: bool
    """Whether it is of routed experts: dim 0 is over experts, and spread over ep ranks as well."""
    shape: tuple[int, ...]
    """Shape of the whole parameter, with all experts."""
    offset: int
    """The first row of dim 0 that is here."""
    length: int
    """How many rows are here; 0 on ranks that got none."""
    replica: int = 0
    """Which of several equal copies this is; number 0 counts in norms and is saved."""

    @property
    def is_empty(self) -> bool:
        return self.length == 0


@dataclass(frozen=True)
class LocalParameter:
    """A parameter's rows on this rank."""

    info: ShardInfo
    parameter: nn.Parameter
    """The rows, in the sharded parameter's memory; the parameter itself if it is not sharded."""
    source: nn.Parameter
    """The parameter that the model has while it is resharded."""


@dataclass(frozen=True)
class LocalParameters:
    """All of a rank's, in the order of the part's parameters; each once, tied or not."""

    entries: tuple[LocalParameter, ...]

    def __iter__(self) -> Iterator[LocalParameter]:
        return iter(self.entries)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The rows, for an optimizer whose rule is elementwise."""
        return [(entry.info.name, entry.parameter) for entry in self.entries]

    def spread(self) -> list[tuple[str, nn.Parameter]]:
        """DTensors where they are sharded, for an optimizer that puts matrices together."""
        return [(entry.info.name, entry.source) for entry in self.entries]

    def trained(self) -> LocalParameters:
        """Without those that are frozen."""
        return LocalParameters(tuple(entry for entry in self.entries if entry.source.requires_grad))

    def infos(self) -> list[ShardInfo]:
        return [entry.info for entry in self.entries]

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Gives every local parameter the reduced gradient of its rows, without a copy. After `Unit.wait_for_gradients`."""
        for entry in self.entries:
            grad = entry.source.grad
            entry.parameter.grad = grad.to_local() if isinstance(grad, DTensor) else grad

    def clear_gradients(self) -> None:
        """Frees them; to be called before the next step adds up its own."""
        for entry in self.entries:
            entry.parameter.grad = None
            entry.source.grad = None

    def gradients(self) -> list[Tensor]:
        """The collected gradients of rows that are here."""
        return [grad for entry in self.entries if (grad := entry.parameter.grad) is not None and not entry.info.is_empty]

    def unique(self) -> list[LocalParameter]:
        """The parameters with gradients, without the copies of what other ranks count."""
        return [entry for entry in self.entries if entry.parameter.grad is not None and not entry.info.is_empty and entry.info.replica == 0]


def local_parameters(part: nn.Module, mesh: Mesh) -> LocalParameters:
    """The rows of every parameter of `part` that this rank has, after `shard` and while nothing is gathered; ValueError otherwise.

    They stay valid through steps and loaded state dicts, but not when `part` is moved or converted.
    """
    experts = {p for module in part.modules() if isinstance(module, Experts) for p in module.parameters()}
    return LocalParameters(tuple(_local_parameter(name, p, p in experts, mesh) for name, p in part.named_parameters()))


@torch.no_grad()
def _local_parameter(name: str, source: nn.Parameter, is_expert: bool, mesh: Mesh) -> LocalParameter:
    parameter, rows, start, length, replica = source, len(source), 0, len(source), 0
    if isinstance(source, DTensor):
        device_mesh = source.device_mesh
        start, length = chunk(rows, device_mesh.size(-1), device_mesh.get_local_rank(device_mesh.ndim - 1))
        replica = device_mesh.get_local_rank(0) if device_mesh.ndim > 1 else 0
        parameter = nn.Parameter(source.to_local(), requires_grad=source.requires_grad)
        assert parameter.shape == (length, *source.shape[1:])
    elif is_shared(mesh.expert_mesh if is_expert else mesh.dense_mesh):
        raise ValueError(f"{name} is not sharded, or is gathered at the moment: call shard first, and reshard every unit")
    if is_expert:
        start, rows = start + mesh.ep_rank * rows, rows * mesh.ep
    info = ShardInfo(name, is_expert, (rows, *source.shape[1:]), start, length, replica)
    return LocalParameter(info, parameter, source)
