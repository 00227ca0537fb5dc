"""The mesh of pipeline, data, context and expert ranks, and the process groups of its axes.

rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * ep + ep_rank, so that expert ranks, which
communicate most, are neighbors. Every (dp, ep) coordinate is a *data rank*: it has its own
sequences, which all ranks of its pipeline share, and of which each of its context ranks has slices.
Routed experts are divided over ep and sharded over dp x cp; all other parameters are sharded over
data = dp x cp x ep. With `replicas` > 1 (HSDP) dp is divided into that many replicas, each of which
holds a complete sharded copy: parameters are then gathered within a replica, at the cost of that
many times the memory.

Axes that divide the same ranks in another way (dp x cp x ep as one, or dp in two) are further
DeviceMeshes over them. Tensor parallelism would be one more axis beside ep; it does not exist yet.

Inside a step ranks wait for each other at most `parallel.timeout`. While one rank works for all,
the others wait in `control_group`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lather.device import gpu_module, is_gpu
from lather.models.context import Context
from lather.parallel.context_ranks import ContextRanks
from lather.torch_private import host_backend, set_timeout

if TYPE_CHECKING:
    from lather.config.config import ParallelConfig

CONTROL_TIMEOUT = timedelta(days=1)
"""Time limit of waits for work such as preparing a data set or writing a checkpoint. Dead ranks are
noticed by the launcher, at once."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank's view of all ranks; groups and device meshes are None in a single process."""

    pp: int
    """Pipeline ranks."""
    dp: int
    """All ranks / (pp * cp * ep), so that there are dp * ep data ranks."""
    ep: int
    """Expert ranks."""
    replicas: int
    """Replicas within dp, each with a complete sharded copy; 1: plain FSDP."""
    rank: int
    device: torch.device
    cp: int = 1
    """Context ranks."""
    keeps_gathered: bool = False
    """See `Context`."""
    pp_group: dist.ProcessGroup | None = None
    neighbor_groups: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    """On a GPU, by pipeline rank: this rank and a neighbor in the pipeline, for their transfers
    alone. NCCL executes the operations of one group in order, and a receive that waits for one
    neighbor must not hold up the transfers with the other."""
    ep_group: dist.ProcessGroup | None = None
    sizes_group: dist.ProcessGroup | None = None
    """A second group of the ranks of `ep_group`, on CUDA only: NCCL executes the operations of one
    group in order, and row counts, for which the host waits, must not queue behind rows."""
    cp_group: dist.ProcessGroup | None = None
    """The ranks that have slices of the same sequences; None without context parallelism."""
    data_group: dist.ProcessGroup | None = None
    """The ranks of one pipeline rank: dp x cp x ep."""
    control_group: dist.ProcessGroup | None = None
    """All ranks, over gloo on any device, with `CONTROL_TIMEOUT`: for Python objects, for errors,
    and for work that one rank does for all."""
    saving_group: dist.ProcessGroup | None = None
    """Like `control_group`, for checkpoints: a thread writes them while another trains, and two
    threads must not share a group."""
    dense_mesh: DeviceMesh | None = None
    """Over data, for parameters other than routed experts: one axis, or ("replicate", "shard")."""
    expert_mesh: DeviceMesh | None = None
    """Over dp x cp, for routed experts: one axis, or ("replicate", "shard")."""

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.ep

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.dp * self.cp * self.ep)

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep

    @property
    def cp_rank(self) -> int:
        return self.rank // self.ep % self.cp

    @property
    def data_rank(self) -> int:
        """The number of this rank's sequences among those of all `data_size` data ranks."""
        return self.rank // (self.cp * self.ep) % self.dp * self.ep + self.ep_rank

    @property
    def data_size(self) -> int:
        return self.dp * self.ep

    @property
    def shard_size(self) -> int:
        """Number of ranks of one pipeline rank, which share its weights: dp x cp x ep."""
        return self.dp * self.cp * self.ep

    @property
    def context(self) -> Context | None:
        """This rank's slices of its sequences; None: it has them whole."""
        if self.cp == 1:
            return None
        keeps = self.keeps_gathered
        return ContextRanks(self.cp_rank, self.cp, self.cp_group, keeps_gathered=keeps)

    @classmethod
    def single(cls, device: torch.device) -> Mesh:
        """Return the mesh of a single process."""
        # the saving thread sets its device to this one, which needs an index
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return cls(pp=1, dp=1, ep=1, replicas=1, rank=0, device=device)

    @classmethod
    def build(cls, config: ParallelConfig, device: torch.device) -> Mesh:
        """Build the mesh of all ranks of the default process group, which must be initialized
        unless this is the only process.

        Collective: every rank calls this with the same arguments. Raises ConfigError if `config`
        does not fit the number of ranks."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        dp = config.data_ranks(world_size) // config.ep
        if world_size == 1:
            return cls.single(device)
        pp, ep, timeout = config.pp, config.ep, timedelta(seconds=config.timeout)
        grid, data, dense, expert = _device_meshes(config, dp, device)
        cp_group = _context_group(config, dp, timeout) if config.cp > 1 else None
        sizes_group = dist.new_subgroups(ep)[0] if ep > 1 and is_gpu(device) else None
        groups = [
            group
            for device_mesh in (grid, data, dense, expert)
            for group in device_mesh.get_all_groups()
        ]
        groups += [group for group in (sizes_group, cp_group) if group]
        for group in groups:
            set_timeout(group, timeout)
        _create_communicators(groups, device)
        neighbor_groups = _neighbor_groups(grid, device, timeout) if is_gpu(device) else {}
        return cls(
            pp=pp,
            dp=dp,
            ep=ep,
            replicas=config.replicas,
            rank=dist.get_rank(),
            device=device,
            cp=config.cp,
            keeps_gathered=config.cp_keep_gathered,
            cp_group=cp_group,
            pp_group=grid.get_group("pp"),
            neighbor_groups=neighbor_groups,
            ep_group=grid.get_group("ep"),
            sizes_group=sizes_group,
            data_group=data.get_group("data"),
            control_group=dist.new_group(backend=host_backend(), timeout=CONTROL_TIMEOUT),
            saving_group=dist.new_group(backend=host_backend(), timeout=CONTROL_TIMEOUT),
            dense_mesh=dense,
            expert_mesh=expert,
        )

    def describe(self) -> str:
        """Return a text such as "8 ranks: 2 pipeline x 2 data x 2 expert"."""
        context = f" x {self.cp} context" if self.cp > 1 else ""
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        return f"{ranks}: {self.pp} pipeline x {self.dp} data{context} x {self.ep} expert{replicas}"


def _device_meshes(
    config: ParallelConfig, dp: int, device: torch.device
) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh, DeviceMesh]:
    """Make the device meshes (pp, dp x cp, ep) and (pp, data); return them, and the parts of this
    rank for dense parameters and for experts. Collective over all ranks."""
    pp, cp, ep, replicas = config.pp, config.cp, config.ep, config.replicas

    def mesh(names: tuple[str, ...], *sizes: int) -> DeviceMesh:
        ranks = torch.arange(pp * dp * cp * ep).view(sizes)
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)

    grid = mesh(("pp", "shard", "ep"), pp, dp * cp, ep)
    data = mesh(("pp", "data"), pp, dp * cp * ep)
    if replicas == 1:
        return grid, data, data["data"], grid["shard"]
    two = ("replicate", "shard")
    dense = mesh(("pp", *two), pp, replicas, dp // replicas * cp * ep)[two]
    expert = mesh(("pp", *two, "ep"), pp, replicas, dp // replicas * cp, ep)[two]
    return grid, data, dense, expert


def _context_group(config: ParallelConfig, dp: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make the groups of context ranks, and return this rank's. Collective over all ranks."""
    ranks = torch.arange(config.pp * dp * config.cp * config.ep)
    rows = ranks.view(-1, config.cp, config.ep).mT.flatten(0, 1).tolist()
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(rows, timeout=timeout)[0]
    return group


def _neighbor_groups(
    grid: DeviceMesh, device: torch.device, timeout: timedelta
) -> dict[int, dist.ProcessGroup]:
    """Make a group of each two neighbors in each pipeline; returns this rank's, by the pipeline
    rank of the other.

    Collective over all ranks. The two exchange a tensor in each direction, so that NCCL has
    connected them before the first step. A rank meets its neighbors in the order of the pairs, and
    so no two wait for each other.
    """
    pp_rank = grid.get_local_rank("pp")
    groups: dict[int, dist.ProcessGroup] = {}
    for first in range(grid.size(0) - 1):
        pairs = grid.mesh[first : first + 2].flatten(1).T.tolist()
        group, _ = dist.new_subgroups_by_enumeration(pairs, timeout=timeout)
        if pp_rank not in (first, first + 1):
            continue
        groups[2 * first + 1 - pp_rank] = group
        sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
        peer = int(pp_rank == first)
        both = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    if is_gpu(device):
        gpu_module(device).synchronize(device)
    return groups


def _create_communicators(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Run one collective operation on each group, so that its communicator exists before anything
    else is sent.

    NCCL would create it at the first operation and wait for all ranks of the group, but the first
    operation of a pipeline is a transfer between two of them. Collective over all ranks, whose
    groups are in the same order.
    """
    for group in dict.fromkeys(groups):
        dist.all_reduce(torch.zeros((), device=device), group=group)
    if is_gpu(device):
        gpu_module(device).synchronize(device)
