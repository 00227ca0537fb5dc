"""Units of parameters that are sharded over data ranks, and gathered, freed and reduced together:
FSDP, with the layout of PyTorch's FSDP2 (DTensors), executed by the trainer.

    dense parameters     over all data ranks: every (dp, ep) coordinate has its own sequences
    routed experts       over dp: each ep rank has its own experts, and the exchange has brought it
                         the tokens of all ep ranks
    replicas (HSDP)      over a 2-D mesh (replicate, shard): sharded within a replica, gradients
                         summed over the replicas

The loss is a sum over tokens divided by the number of tokens on all ranks. So the gradient of every
parameter is the plain sum over data ranks, and nothing is divided. Sums are in fp32, or in fp64 for
fp64.

FSDP2's hooks gather parameters before a module is called, and reduce gradients in its backward
pass. A pipeline calls the segments of a block one by one, for alternating micro-batches, so the
hooks would run at the wrong times. Here the executor gathers, frees and reduces units: for whole
stages when the schedule says so, or block by block (`lather.pipeline.gathering`). Until they are
reduced, gradients accumulate in `.grad` of the gathered parameters, without communication.

A single process, and parameters that only one rank has, use the same code: nothing is gathered and
nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lather.boxes import gradient_dtype
from lather.models.experts import Experts
from lather.models.saving.rounded_weights import product_weights
from lather.parallel.mesh import Mesh
from lather.parallel.sharded_parameters import (
    Places,
    ShardedParameters,
    Storing,
)
from lather.parallel.side_streams import Reductions, Streams
from lather.torch_private import check_torch_version

LARGE = 2**26
"""Bytes of a parameter that is gathered and reduced by itself, and needs no buffer for that."""


@dataclass(eq=False)
class FsdpUnit:
    """Parameters that are gathered, freed and reduced together.

    Several passes may need them at once: the first that asks gathers them, and the last that
    releases them frees them. Autograd keeps references to gathered parameters; these are the same
    tensors each time that they are gathered, with the same storages.
    """

    modules: nn.ModuleList
    sharded: tuple[ShardedParameters, ...] = ()
    """The parameters that are gathered or reduced, by mesh."""
    trained: tuple[nn.Parameter, ...] = ()
    """The other trained parameters, which this rank alone has."""
    reductions: Reductions | None = None
    """The reductions that are under way on the rank."""
    _holding: int = field(default=0, init=False)

    @property
    def gathered(self) -> list[nn.Parameter]:
        """The parameters whose values exist only while the unit is gathered."""
        return [p for parameters in self.sharded for p in parameters.gathered]

    @property
    def host_bytes(self) -> int:
        """Bytes that a gather brings to a GPU from the host's memory."""
        return sum(parameters.host_bytes for parameters in self.sharded)

    @property
    def sums(self) -> list[Tensor]:
        """The sums of gradients that are kept between reductions."""
        return [total for parameters in self.sharded for total in parameters.sums]

    @property
    def is_gathered(self) -> bool:
        """Whether a pass has asked for the parameters and not released them."""
        return self._holding > 0

    def unshard(self, *, async_op: bool = False) -> None:
        """Gather the parameters on this rank; they are available after `wait`.

        With `async_op` the buffers of all meshes are alive until then, besides the parameters;
        otherwise one at a time."""
        self._holding += 1
        if self._holding == 1:
            for parameters in self.sharded:
                parameters.gather()
                if not async_op:
                    parameters.wait()

    def wait(self) -> None:
        """Make the current stream wait for `unshard`; the host waits only with gloo."""
        for parameters in self.sharded:
            parameters.wait()

    def reshard(self) -> None:
        """Free the gathered parameters; their gradients stay until they are reduced."""
        assert self._holding > 0, "reshard without unshard"
        self._holding -= 1
        if self._holding == 0:
            for parameters in self.sharded:
                parameters.wait()
                parameters.free()

    def reduce_gradients(self) -> None:
        """Launch the sum over data ranks of the gradients that have accumulated since the last
        call, and free these. The parameters need not be gathered.

        After `wait_for_gradients` every trained parameter has a gradient, the sum of all
        reductions: one without a gradient on this rank counts as zero, so that all ranks
        communicate alike and the optimizer sees the same parameters on every mesh.
        """
        for p in self.trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=gradient_dtype(p))
        if self.reductions is not None:
            self.reductions.finish()  # those of the unit before, whose buffers are as large
        for parameters in self.sharded:
            parameters.reduce()

    def wait_for_gradients(self) -> None:
        """Make the current stream wait for the reductions, and give the sharded parameters their
        gradients."""
        for parameters in self.sharded:
            parameters.finish()

    def drop_gradients(self) -> None:
        """Drop gradients, their sums and the buffers of reductions after an error, without waiting
        for other ranks, which may never come."""
        for p in self.trained:
            p.grad = None
        for parameters in self.sharded:
            parameters.drop_gradients()
        if self.reductions is not None:
            self.reductions.drop()


def shard(
    modules: Sequence[Sequence[nn.Module]],
    mesh: Mesh,
    allocate: Callable[[Sequence[nn.Module], torch.device], None],
    storing: Storing = Storing(),  # noqa: B008
) -> list[FsdpUnit]:
    """Shard the parameters of the modules in place, and return a unit for each group of modules;
    together these have all parameters of a rank, and no parameter is in two groups.

    Sharded parameters are replaced by DTensors. Call this once, when the parameters have their
    final dtype; `allocate` is called for each group before it is sharded, so that no other needs to
    have memory for whole parameters. Raises UserError if this torch is not supported."""
    if mesh.shard_size > 1:
        check_torch_version()
    host_bytes = sum(
        -(-p.nbytes // (1 if device_mesh is None else device_mesh.size(device_mesh.ndim - 1)))
        for group in modules
        for places, device_mesh in _by_mesh(group, mesh)
        for p in places
        if storing.frozen_on_host and not p.requires_grad
    )
    streams, units = Streams(mesh.device, host_bytes), []
    for group in modules:
        allocate(group, mesh.device)
        units.append(_unit(group, mesh, storing, streams))
    return units


def _unit(modules: Sequence[nn.Module], mesh: Mesh, storing: Storing, streams: Streams) -> FsdpUnit:
    rounded = product_weights(modules)
    sharded: list[ShardedParameters] = []
    others: list[nn.Parameter] = []
    for places, device_mesh in _by_mesh(modules, mesh):
        trained = {p for p in places if p.requires_grad}
        on_host = places.keys() - trained if storing.frozen_on_host else set()
        on_device = places.keys() - on_host
        if device_mesh is None:
            copied = (rounded if storing.rounds_own else set()) | (
                trained if storing.gradients else set()
            )
            others += [p for p in places if p in trained - copied]
            on_device &= copied
        for chosen in (on_device, on_host):
            alone = {p for p in chosen if is_large(p) and device_mesh is not None}
            for part in (chosen - alone, *({p} for p in places if p in alone)):
                if part:
                    of_part = {p: at for p, at in places.items() if p in part}
                    make = partial(ShardedParameters, on_host=chosen is on_host)
                    sharded.append(make(of_part, device_mesh, storing, rounded, streams))
    return FsdpUnit(nn.ModuleList(modules), tuple(sharded), tuple(others), streams.reductions)


def _by_mesh(
    modules: Sequence[nn.Module], mesh: Mesh
) -> Iterator[tuple[Mapping[nn.Parameter, Places], DeviceMesh | None]]:
    """Yield the dense parameters of the modules and those of routed experts, each with its places,
    and the mesh over which they are shared; None: this rank alone has them."""
    layers = dict.fromkeys(layer for module in modules for layer in module.modules())
    experts = {part for layer in layers if isinstance(layer, Experts) for part in layer.modules()}
    for of_experts, device_mesh in ((False, mesh.dense_mesh), (True, mesh.expert_mesh)):
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for layer in layers:
            if (layer in experts) == of_experts:
                for name, p in layer.named_parameters(recurse=False):
                    places.setdefault(p, []).append((layer, name))
        yield places, device_mesh if is_shared(device_mesh) else None


def is_large(p: nn.Parameter) -> bool:
    return p.numel() * p.itemsize >= LARGE


def is_shared(mesh: DeviceMesh | None) -> bool:
    """Return whether parameters on this mesh are sharded, or have replicas on other ranks."""
    return mesh is not None and mesh.size() > 1
