"""This rank's rows of every parameter, as plain parameters, and the DTensors that an optimizer
steps; the norm of their gradients, and the factor that clips it, with the same numbers on any mesh
as in one process.

A sharded parameter is split on dim 0: rows of a matrix, or whole experts of a stack. If dim 0 has
fewer rows than there are ranks, some ranks have none.

    squared_norm  this rank's part of the sum of squares: every row of every parameter counts once
                  over all pipeline stages, shards and experts, without replicas
    clip_factor   that of `torch.nn.utils.clip_grads_with_norm_`, by which the optimizer multiplies
                  the gradients; 1 if the norm is small enough

Norms do not wait for the device. `clip_factor` takes a norm that is on the host, where steps that
are not finite are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lather.boxes import chunk
from lather.kernels.remainder import split
from lather.models.experts import Experts
from lather.parallel.fsdp_units import is_shared
from lather.parallel.mesh import Mesh
from lather.shapes import Float
from lather.torch_private import foreach_norm


@dataclass(frozen=True)
class ShardInfo:
    """The part of a parameter of the whole model that a rank has."""

    name: str
    """Name in the whole model."""
    is_expert: bool
    """Whether it belongs to routed experts: dim 0 is then over experts, which are also divided
    among ep ranks."""
    shape: tuple[int, ...]
    """Shape of the whole parameter, with all experts."""
    offset: int
    """First row of dim 0 on this rank."""
    length: int
    """Number of rows on this rank; may be 0."""
    replica: int = 0
    """Number of this copy among equal ones; copy 0 counts in norms and is saved."""

    @property
    def is_empty(self) -> bool:
        return self.length == 0


@dataclass(frozen=True)
class LocalParameter:
    """This rank's rows of a parameter."""

    info: ShardInfo
    parameter: nn.Parameter
    """The rows, in the memory of the sharded parameter; the parameter itself if it is not
    sharded."""
    source: nn.Parameter
    """The parameter of the model while it is resharded."""


class LocalParameters(tuple[LocalParameter, ...]):
    """All local parameters of a rank, in the order of the part's parameters; tied ones once."""

    @functools.cached_property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of norms: that of the gradients, at least fp32."""
        return functools.reduce(
            torch.promote_types, (entry.parameter.dtype for entry in self), torch.float32
        )

    def spread(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters for an optimizer: DTensors where they are sharded."""
        return [(entry.info.name, entry.source) for entry in self]

    def trained(self) -> LocalParameters:
        """Return the parameters that are not frozen."""
        return LocalParameters(entry for entry in self if entry.source.requires_grad)

    @functools.cached_property
    def remainders(self) -> dict[nn.Parameter, Tensor]:
        """`LocalParameter.source` -> what rounding dropped from its rows when they were filled,
        until an optimizer takes it."""
        return {}

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's rows of the named whole parameters that it has."""
        entries = {entry.info.name: entry for entry in self}
        for name, value in weights:
            if (entry := entries.get(name)) is not None:
                rows, p = value.narrow(0, entry.info.offset, entry.info.length), entry.parameter
                if p.dtype == torch.bfloat16 and entry.source.requires_grad:
                    self.remainders[entry.source] = r = torch.empty_like(p, dtype=torch.int16)
                    split(rows.to(p.device, torch.float32), p.detach(), r)
                else:
                    p.copy_(rows)
            del value  # before the next one is allocated

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Give every local parameter the reduced gradient of its rows, without a copy. Call it
        after `FsdpUnit.wait_for_gradients`."""
        for entry in self:
            grad = entry.source.grad
            entry.parameter.grad = grad.to_local() if isinstance(grad, DTensor) else grad

    def clear_gradients(self) -> None:
        """Free the gradients; call it before the next step accumulates its own."""
        for entry in self:
            entry.parameter.grad = None
            entry.source.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the collected gradients of parameters that have rows on this rank."""
        return [
            grad
            for entry in self
            if (grad := entry.parameter.grad) is not None and not entry.info.is_empty
        ]

    def unique(self) -> list[LocalParameter]:
        """Return the parameters with gradients, without replicas that another rank counts."""
        return [
            entry
            for entry in self
            if entry.parameter.grad is not None
            and not entry.info.is_empty
            and entry.info.replica == 0
        ]


def local_parameters(part: nn.Module, mesh: Mesh) -> LocalParameters:
    """Return this rank's rows of every parameter of `part`, after `shard` and while nothing is
    gathered.

    The rows stay valid through steps and loaded state dicts, but not if `part` is moved or
    converted.
    """
    experts = {
        p for module in part.modules() if isinstance(module, Experts) for p in module.parameters()
    }
    return LocalParameters(
        _local_parameter(name, p, p in experts, mesh) for name, p in part.named_parameters()
    )


@torch.no_grad()
def _local_parameter(
    name: str, source: nn.Parameter, is_expert: bool, mesh: Mesh
) -> LocalParameter:
    parameter, rows, start, length, replica = source, len(source), 0, len(source), 0
    if isinstance(source, DTensor):
        device_mesh = source.device_mesh
        start, length = chunk(
            rows, device_mesh.size(-1), device_mesh.get_local_rank(device_mesh.ndim - 1)
        )
        replica = device_mesh.get_local_rank(0) if device_mesh.ndim > 1 else 0
        parameter = nn.Parameter(source.to_local(), requires_grad=source.requires_grad)
        if source.requires_grad:
            parameter.grad_dtype = source.grad_dtype
        assert parameter.shape == (length, *source.shape[1:])
    else:
        is_sharded = is_shared(mesh.expert_mesh if is_expert else mesh.dense_mesh)
        assert not is_sharded, f"{name} is gathered at the moment"
    if is_expert:
        start, rows = start + mesh.ep_rank * rows, rows * mesh.ep
    info = ShardInfo(name, is_expert, (rows, *source.shape[1:]), start, length, replica)
    return LocalParameter(info, parameter, source)


@torch.no_grad()
def squared_norm(
    parameters: LocalParameters,
    mesh: Mesh,
    known: Mapping[Tensor, Tensor],
) -> Float[Tensor, ""]:
    """Return this rank's part of the squared norm of the gradients of the whole model, in fp64, on
    `mesh.device`.

    Call it after `collect_gradients`. `known`: for each `LocalParameter.source` whose gradient was
    measured already, the 2-norms (1-D) of the parts of this rank's gradient.
    """
    norms, unmeasured = [], []
    for entry in parameters.unique():
        measured = known.get(entry.source)
        if measured is None:
            unmeasured.append(cast(Tensor, entry.parameter.grad))
        else:
            norms.append(measured)
    if unmeasured:
        norms.append(torch.stack(foreach_norm(unmeasured, 2, dtype=parameters.norm_dtype)))
    return (
        torch.cat(norms).double().square().sum()
        if norms
        else torch.zeros((), dtype=torch.float64, device=mesh.device)
    )


def clip_factor(norm: Float[Tensor, ""], max_norm: float) -> float:
    """Return max_norm / (norm + 1e-6) in the norm's dtype, but at most 1, and never 0."""
    factor = max_norm / (norm.cpu() + 1e-6)
    return float(factor.clamp(torch.finfo(factor.dtype).tiny, 1.0))
