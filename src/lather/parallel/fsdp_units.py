"""Shards parameters over data ranks with FSDP2 (`torch.distributed.fsdp.fully_shard`), without its
hooks and without its division.

    dense parameters     over all data ranks: every (dp, ep) coordinate has its own sequences
    routed experts       over dp: each ep rank has its own experts, and the exchange has brought it
                         the tokens of all ep ranks
    replicas (HSDP)      over a 2-D mesh (replicate, shard): sharded within a replica, gradients
                         summed over the replicas

The loss is a sum over tokens divided by the number of tokens on all ranks. So the gradient of every
parameter is the plain sum over data ranks, and FSDP2's division is off. Sums are in the parameters'
dtype, which is fp32 or fp64.

FSDP2's hooks gather parameters before a module is called, and reduce gradients in its backward
pass. A pipeline calls the segments of a block one by one, for alternating micro-batches, so the
hooks would run at the wrong times. `fully_shard` is therefore applied to holders: modules that
contain a block's experts, or the rest of the block, and are never called. The executor gathers,
frees and reduces units: for whole stages when the schedule says so, or block by block
(`lather.pipeline.gathering`). Until they are reduced, gradients accumulate in `.grad` of the
unsharded parameters, without communication; reductions add to `.grad` of the sharded ones.

A single process, and parameters that only one rank has, use the same code: nothing is gathered and
nothing is reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from lather.models.experts import Experts
from lather.parallel.mesh import Mesh
from lather.torch_private import (
    finish_gradient_reduction,
    prepare_sharding,
    start_gradient_reduction,
)


class Holder(nn.Module):
    """A module, never called, that contains existing modules, so that FSDP2 finds their
    parameters."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)


@dataclass
class Reductions:
    """Reductions of a rank's units that are under way; they run one after another through one
    buffer."""

    root: Holder | None = None
    """Contains the sharded holders of all units; None: nothing is sharded."""
    is_launched: bool = False


@dataclass(eq=False)
class FsdpUnit:
    """Parameters that are gathered, freed and reduced together.

    Several passes may need them at once: the first that asks gathers them, and the last that
    releases them frees them. Autograd keeps references to gathered parameters; these are the same
    tensors each time that they are gathered, with the same storages.
    """

    modules: nn.ModuleList
    holders: tuple[FSDPModule, ...] = ()
    """Holders of the parameters that are shared with other ranks."""
    reductions: Reductions = field(default_factory=Reductions)
    gathered: tuple[nn.Parameter, ...] = field(default=(), init=False)
    """The parameters whose values exist only while the unit is gathered; known after the first
    `wait`."""
    _trained: tuple[nn.Parameter, ...] = field(default=(), init=False)
    _holding: int = field(default=0, init=False)
    _gathering: list[UnshardHandle] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._are_sharded = tuple(isinstance(p, DTensor) for p in self.modules.parameters())

    @property
    def is_gathered(self) -> bool:
        """Whether a pass has asked for the parameters and not released them."""
        return self._holding > 0

    def unshard(self, *, async_op: bool = False) -> None:
        """Gather the parameters on this rank; they are available after `wait`.

        With `async_op` the gathered buffers of all holders are alive until then, besides the
        parameters; otherwise one at a time."""
        self._holding += 1
        if self._holding == 1:
            handles = [holder.unshard(async_op=async_op) for holder in self.holders]
            self._gathering += filter(None, handles)

    def wait(self) -> None:
        """Make the current stream wait for `unshard`; the host waits only with gloo."""
        for handle in self._gathering:
            handle.wait()
        self._gathering.clear()
        if not self._trained and not self.gathered:
            whole = tuple(self.modules.parameters())
            self.gathered = tuple(itertools.compress(whole, self._are_sharded))
            self._trained = tuple(p for p in whole if p.requires_grad)

    def reshard(self) -> None:
        """Free the gathered parameters; their gradients stay until they are reduced."""
        assert self._holding > 0, "reshard without unshard"
        self._holding -= 1
        if self._holding == 0:
            self.wait()
            for holder in self.holders:
                holder.reshard()

    def reduce_gradients(self) -> None:
        """Launch the sum over data ranks of the gradients that have accumulated since the last
        call, and free these. The parameters must have been gathered before, and may be free.

        After `wait_for_gradients` every trained parameter has a gradient, the sum of all
        reductions: one without a gradient on this rank counts as zero, so that all ranks
        communicate alike and the optimizer sees the same parameters on every mesh.
        """
        for p in self._trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for holder in self.holders:
            start_gradient_reduction(holder)
            self.reductions.is_launched = True

    def wait_for_gradients(self) -> None:
        """Make the current stream wait for the reductions of all units."""
        if self.reductions.is_launched:
            assert self.reductions.root is not None
            finish_gradient_reduction(self.reductions.root)
            self.reductions.is_launched = False


def shard(
    modules: Sequence[Sequence[nn.Module]],
    mesh: Mesh,
    allocate: Callable[[Sequence[nn.Module], torch.device], None],
) -> list[FsdpUnit]:
    """Shard the parameters of the modules in place, and return a unit for each group of modules;
    together these have all parameters of a rank, and no parameter is in two groups.

    Sharded parameters are replaced by DTensors. Call this once, when the parameters have their
    final dtype, which is fp32 or fp64; `allocate` is called for each group before it is sharded, so
    that no other needs to have memory for whole parameters."""
    wide = (torch.float32, torch.float64)  # narrower sums of many micro-batches lose gradients
    assert mesh.data_size == 1 or all(
        p.dtype in wide for group in modules for module in group for p in module.parameters()
    )
    holders = []
    for group in modules:
        allocate(group, mesh.device)
        holders.append(_holders(group, mesh))
    reductions = Reductions()
    if sharded := [holder for of_unit in holders for holder in of_unit]:
        root = reductions.root = Holder(sharded)
        # without parameters of its own, so the mesh does not matter
        fully_shard(root, mesh=mesh.dense_mesh, reshard_after_forward=False)
        prepare_sharding(root)
    return [
        FsdpUnit(nn.ModuleList(group), tuple(of_unit), reductions)
        for group, of_unit in zip(modules, holders, strict=True)
    ]


def _holders(modules: Sequence[nn.Module], mesh: Mesh) -> list[FSDPModule]:
    """Create a holder for the experts of the modules, and one for the rest of them, if they have
    parameters that are shared with other ranks."""
    experts = [m for module in modules for m in module.modules() if isinstance(m, Experts)]
    expert_params = {p for m in experts for p in m.parameters()}
    holders = []
    for held, device_mesh, ignored in (
        (modules, mesh.dense_mesh, expert_params),
        (experts, mesh.expert_mesh, set()),
    ):
        params = {p for m in held for p in m.parameters()} - ignored
        if params and is_shared(device_mesh):
            holder = Holder(held)
            fully_shard(
                holder, mesh=device_mesh, reshard_after_forward=False, ignored_params=ignored
            )
            assert isinstance(holder, FSDPModule)
            holder.set_gradient_divide_factor(1.0)
            holder.set_force_sum_reduction_for_comms(True)
            holder.set_reshard_after_backward(False)
            holders.append(holder)
    return holders


def is_shared(mesh: DeviceMesh | None) -> bool:
    """Return whether parameters on this mesh are sharded, or have replicas on other ranks."""
    return mesh is not None and mesh.size() > 1
