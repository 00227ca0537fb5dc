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
contain a block's experts, or the rest of the block, and are never called. The schedule's actions
UNSHARD, RESHARD and REDUCE_GRAD gather, reshard and reduce. Until REDUCE_GRAD, gradients accumulate
in `.grad` of the unsharded parameters, without communication.

A single process, and parameters that only one rank has, use the same code: nothing is gathered and
nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard

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
class FsdpUnit:
    """Parameters that are gathered, resharded and reduced together.

    `users` stages need them: the first that asks gathers them, the last that releases them
    reshards, and the last that asks to reduce reduces.
    """

    modules: nn.ModuleList
    root: Holder | None = None
    """Contains all sharded holders, which reduce one after another through one buffer; None:
    nothing is sharded."""
    users: int = 1
    _holding: int = field(default=0, init=False)
    _reducing: int = field(default=0, init=False)
    _launched: bool = field(default=False, init=False)
    _gathering: list[UnshardHandle] = field(default_factory=list, init=False)

    @property
    def is_gathered(self) -> bool:
        """Whether a stage has asked for the parameters and not released them."""
        return self._holding > 0

    def unshard(self, *, async_op: bool = False) -> None:
        """Gather the parameters on this rank. With `async_op` they are available after `wait`.

        With `async_op` the gathered buffers of all holders are alive until then, besides the
        parameters; otherwise one at a time."""
        self._holding += 1
        if self._holding == 1:
            handles = [holder.unshard(async_op=async_op) for holder in self._sharded()]
            self._gathering += filter(None, handles)

    def wait(self) -> None:
        """Make the current stream wait for `unshard`; the host waits only with gloo."""
        for handle in self._gathering:
            handle.wait()
        self._gathering.clear()

    def reshard(self) -> None:
        """Free the gathered parameters; their gradients stay until they are reduced."""
        assert self._holding > 0, "reshard without unshard"
        self._holding -= 1
        if self._holding == 0:
            self.wait()
            for holder in self._sharded():
                holder.reshard()

    def reduce_gradients(self) -> None:
        """Launch the sum over data ranks of the accumulated gradients, and free these. Call it
        while the parameters are gathered.

        After `wait_for_gradients` every sharded parameter has a gradient: one without a gradient on
        this rank counts as zero, so that all ranks communicate alike and the optimizer sees the
        same parameters on every mesh.
        """
        assert self._holding > 0, (
            "reduce_gradients needs gathered parameters: call it before reshard"
        )
        self._reducing += 1
        if self._reducing < self.users:
            return
        self._reducing = 0
        self.wait()
        for p in self.modules.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.root is not None:
            start_gradient_reduction(self.root)
            self._launched = True

    def wait_for_gradients(self) -> None:
        """Make the current stream wait for `reduce_gradients`, if that was launched."""
        if self._launched:
            assert self.root is not None
            finish_gradient_reduction(self.root)
            self._launched = False

    def _sharded(self) -> list[FSDPModule]:
        return (
            []
            if self.root is None
            else [holder for holder in self.root.held if isinstance(holder, FSDPModule)]
        )


def shard(part: nn.Module, mesh: Mesh) -> list[list[FsdpUnit]]:
    """Shard the parameters of `part` in place, and return the units of each of `part.stages`: its
    blocks, and the parameters that stages share.

    Shared are the parameters outside of blocks: embedding, final norm and head, which are on one
    rank, and one weight if they are tied. Sharded parameters are replaced by DTensors. Call this
    once, when the parameters are on `mesh.device` with values and in their final dtype, which is
    fp32 or fp64."""
    wide = (torch.float32, torch.float64)  # narrower sums of many micro-batches lose gradients
    assert mesh.data_size == 1 or all(p.dtype in wide for p in part.parameters())
    stages: list[nn.Module] = list(part.stages)  # type: ignore[arg-type]
    blocks = [[*stage.blocks, *stage.mtp_blocks] for stage in stages]  # type: ignore[misc]
    in_blocks = {p for members in blocks for block in members for p in block.parameters()}
    shared = [
        m for m in part.modules() if any(p not in in_blocks for p in m.parameters(recurse=False))
    ]
    units = [[_unit(members, mesh)] for members in blocks]
    if shared:
        unit = _unit([Holder(shared)], mesh, users=len(stages))
        for of_stage in units:
            of_stage.append(unit)
    return units


def _unit(modules: list[nn.Module], mesh: Mesh, users: int = 1) -> FsdpUnit:
    """Create a holder for the experts of each module, and one for the rest of it, if they have
    parameters that are shared with other ranks."""
    sharded = []
    for module in modules:
        experts = [m for m in module.modules() if isinstance(m, Experts)]
        expert_params = {p for m in experts for p in m.parameters()}
        for held, device_mesh, ignored in (
            ([module], mesh.dense_mesh, expert_params),
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
                sharded.append(holder)
    if not sharded:
        return FsdpUnit(nn.ModuleList(modules), None, users)
    root = Holder(sharded)  # without parameters of its own, so the mesh does not matter
    fully_shard(root, mesh=mesh.dense_mesh, reshard_after_forward=False)
    prepare_sharding(root)
    return FsdpUnit(nn.ModuleList(modules), root, users)


def is_shared(mesh: DeviceMesh | None) -> bool:
    """Return whether parameters on this mesh are sharded, or have replicas on other ranks."""
    return mesh is not None and mesh.size() > 1
