"""Parameters sharded over data ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`), without its hooks and without division.

    dense parameters     over all data ranks: every (dp, ep) coordinate has sequences of its own
    routed experts       over dp: each ep rank has experts of its own, and the exchange brought it the tokens of all ep ranks
    replicas (HSDP)      a 2-D mesh (replicate, shard): sharded inside a replica, gradients added over the replicas

The loss is a sum over tokens divided by the tokens of all ranks. A gradient is therefore the plain sum over data ranks, of experts and of
the rest alike, and FSDP2's division is off. Sums are in the parameters' dtype, fp32 at least.

FSDP2 works by hooks around a module's call: gather before it, reduce in its backward pass. A pipeline calls a block's segments one by
one, for one micro-batch and then another's, so the hooks would be at the wrong times. `fully_shard` is applied to holders, modules that
contain a block's experts or the rest of it and are never called. Parameters are gathered, resharded and reduced when the schedule says so:
UNSHARD, RESHARD, REDUCE_GRAD. Until then gradients add up in `.grad` of the whole parameters, without communication.

One process, and parameters that one rank has for itself, go the same way: nothing is gathered and nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard

from lather.models.experts import Experts
from lather.parallel.mesh import Mesh
from lather.torch_private import finish_gradient_reduction, prepare_sharding, start_gradient_reduction


class Holder(nn.Module):
    """Contains modules that exist elsewhere, for FSDP2 to find their parameters. It is never called."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)


@dataclass
class FsdpUnit:
    """Parameters that are gathered, resharded and reduced together.

    `users` stages need them: they are gathered for the first that asks, resharded when the last one lets go, and reduced when all asked.
    """

    modules: nn.ModuleList
    root: Holder | None = None
    """Around all sharded holders, which reduce one after another by way of one buffer; None: nothing is sharded."""
    users: int = 1
    _holding: int = field(default=0, init=False)
    _reducing: int = field(default=0, init=False)
    _launched: bool = field(default=False, init=False)
    _gathering: list[UnshardHandle] = field(default_factory=list, init=False)

    @property
    def has_peers(self) -> bool:
        """Whether other ranks take part in what it does."""
        return self.root is not None

    @property
    def is_gathered(self) -> bool:
        """Whether a stage has asked for the parameters and not let go of them."""
        return self._holding > 0

    def unshard(self, *, async_op: bool = False) -> None:
        """Whole parameters on this rank, as at the last optimizer step. With `async_op` they are there after `wait`.

        Asynchronously, every holder's gathered buffer is alive until then, besides the parameters made of it; otherwise one at a time.
        """
        self._holding += 1
        if self._holding > 1:
            return
        for holder in self._sharded():
            handle = holder.unshard(async_op=async_op)
            if handle is not None:
                self._gathering.append(handle)

    def wait(self) -> None:
        """The current stream waits for `unshard`; the host does not, but on gloo."""
        for handle in self._gathering:
            handle.wait()
        self._gathering.clear()

    def reshard(self) -> None:
        """Frees the whole parameters; their gradients stay until they are reduced."""
        assert self._holding > 0, "reshard without unshard"
        self._holding -= 1
        if self._holding == 0:
            self.wait()
            for holder in self._sharded():
                holder.reshard()

    def reduce_gradients(self) -> None:
        """Launches the sum over data ranks of what has added up in the whole parameters' gradients, which are freed.

        After `wait_for_gradients` every sharded parameter has a gradient: a parameter without one here counts as zero, so that all ranks
        communicate alike and the optimizer sees the same parameters on every mesh. To be called while the parameters are gathered.
        """
        assert self._holding > 0, "reduce_gradients needs gathered parameters: call it before reshard"
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

    def abandon(self) -> None:
        """After an error half-way through a step: whoever held parameters is gone. A process without peers may go on."""
        self._holding = self._reducing = 0

    def wait_for_gradients(self) -> None:
        """The current stream waits for `reduce_gradients`. Nothing happens if that was not launched."""
        if self._launched:
            assert self.root is not None
            finish_gradient_reduction(self.root)
            self._launched = False

    def _sharded(self) -> list[FSDPModule]:
        return [] if self.root is None else [holder for holder in self.root.held if isinstance(holder, FSDPModule)]


def shard(part: nn.Module, mesh: Mesh) -> list[list[FsdpUnit]]:
    """For each of `part.stages` the units that its UNSHARD, RESHARD and REDUCE_GRAD act on: its blocks, and what all stages share.

    Shared is what is in no block: embedding, final norm and head, which are on one rank, with one weight if they are tied. The parameters
    of `part` that are sharded are replaced by DTensors, in place. To be called once, when they are on `mesh.device` with values and in
    their final dtype. Raises TypeError for parameters of different dtypes, or narrower than fp32, if gradients are summed over ranks.
    """
    if mesh.data_size > 1:
        check_dtypes(part)
    stages: list[nn.Module] = list(part.stages)  # type: ignore[arg-type]
    blocks = [list(stage.blocks) for stage in stages]  # type: ignore[arg-type]
    in_blocks = {p for members in blocks for block in members for p in block.parameters()}
    shared = [m for m in part.modules() if any(p not in in_blocks for p in m.parameters(recurse=False))]
    units = [[_unit(members, mesh)] for members in blocks]
    if shared:
        unit = _unit([Holder(shared)], mesh, users=len(stages))
        for own in units:
            own.append(unit)
    return units


def _unit(modules: list[nn.Module], mesh: Mesh, users: int = 1) -> FsdpUnit:
    """One holder for each module's experts, one for the rest of it, as far as there is anything to share."""
    policy = MixedPrecisionPolicy(reduce_dtype=_reduce_dtype(modules))
    sharded = []
    for module in modules:
        experts = [m for m in module.modules() if isinstance(m, Experts)]
        expert_params = {p for m in experts for p in m.parameters()}
        for held, device_mesh, ignored in (([module], mesh.dense_mesh, expert_params), (experts, mesh.expert_mesh, set())):
            params = {p for m in held for p in m.parameters()} - ignored
            if params and is_shared(device_mesh):
                holder = Holder(held)
                fully_shard(holder, mesh=device_mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)
                assert isinstance(holder, FSDPModule)
                holder.set_gradient_divide_factor(1.0)
                holder.set_force_sum_reduction_for_comms(True)
                holder.set_reshard_after_backward(False)
                sharded.append(holder)
    if not sharded:
        return FsdpUnit(nn.ModuleList(modules), None, users)
    root = Holder(sharded)  # it has no parameters of its own: any mesh will do
    fully_shard(root, mesh=mesh.dense_mesh, reshard_after_forward=False)
    prepare_sharding(root)
    return FsdpUnit(nn.ModuleList(modules), root, users)


def is_shared(mesh: DeviceMesh | None) -> bool:
    """Whether parameters on this mesh are sharded or have copies on other ranks."""
    return mesh is not None and mesh.size() > 1


def check_dtypes(part: nn.Module) -> None:
    dtypes = {p.dtype for p in part.parameters()}
    if len(dtypes) > 1:
        raise TypeError(f"parameters have dtypes {sorted(map(str, dtypes))}: what is gathered together must have one; convert the model")
    for dtype in dtypes:
        if torch.promote_types(dtype, torch.float32) != dtype:
            raise TypeError(
                f"parameters have dtype {dtype}, in which gradients of many micro-batches do not add up: "
                "keep fp32 parameters and compute in bf16 under torch.autocast"
            )


def _reduce_dtype(modules: list[nn.Module]) -> torch.dtype:
    for module in modules:
        for p in module.parameters():
            return torch.promote_types(p.dtype, torch.float32)
    return torch.float32
