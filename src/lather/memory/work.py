"""Counts the work of a rank's step: flops of matrix products, attention and factorizations, bytes
sent to other ranks, bytes of frozen weights that come from the host's memory, and the time that the
kernels would take on a device (`lather.time_model`).

A dry run (`lather.memory.dry_run`) counts it, operation by operation. Flops inside Triton kernels
are not counted, their time is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lather.standin.operations import nbytes
from lather.storages import tensors_in
from lather.time_model.launches import TRITON, KernelLaunch
from lather.time_model.rates import H100, TRANSFERS, RateTable

MICRO_BATCHES, REFRESH, REST = "micro-batches", "refresh", "rest"


@dataclass(frozen=True)
class Work:
    """Work of a rank: flops, bytes that it sends to other ranks, and bytes from its host.
    Collectives are assumed to use rings."""

    flops: float = 0.0
    experts: float = 0.0
    """Bytes of token rows sent to the experts of other ranks, and back."""
    parameters: float = 0.0
    """Bytes of gathered parameters, of reduced gradients, and of sums over ranks."""
    pipeline: float = 0.0
    """Bytes of activations and gradients sent to the neighboring stages."""
    optimizer: float = 0.0
    """Bytes sent in the optimizer's step: gradients to owners, updates from them."""
    context: float = 0.0
    """Bytes of keys and values, of latents, or of states, sent to context ranks, and of their
    gradients."""
    frozen: float = 0.0
    """Bytes of frozen weights fetched from the host's memory."""
    launches: float = 0.0
    """Number of kernels."""
    seconds: float = 0.0
    """Predicted seconds of the kernels on the device, one after the other."""

    @property
    def sent(self) -> float:
        """All bytes sent to other ranks."""
        return self.experts + self.parameters + self.pipeline + self.optimizer + self.context

    def __add__(self, other: Work) -> Work:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(first + second for first, second in pairs))

    def __mul__(self, factor: float) -> Work:
        return Work(*(value * factor for value in vars(self).values()))


@dataclass
class WorkTally:
    """Sums the work of a step by how often it occurs: for every micro-batch, for every refresh of
    the bases, or once."""

    repeats: float
    """Micro-batches of the run per micro-batch of the dry run."""
    in_micro_batch: bool = False
    in_optimizer: bool = False
    in_context: bool = False
    """Whether context ranks exchange (`lather.parallel.context_ranks`)."""
    refreshing: bool = False
    rates: RateTable = H100
    """Rates of the device."""
    sums: defaultdict[str, Work] = field(default_factory=lambda: defaultdict(Work))

    def restart(self) -> None:
        self.sums.clear()

    def add(self, work: Work) -> None:
        when = MICRO_BATCHES if self.in_micro_batch else REFRESH if self.refreshing else REST
        self.sums[when] += work * (self.repeats if self.in_micro_batch else 1.0)

    def launched(self, launch: KernelLaunch) -> None:
        """Add a launch; transfers between the device and its host have a time of their own
        (`lather.memory.step_time`)."""
        flops = 0 if launch.name.startswith(TRITON) else launch.flops
        seconds = 0.0 if launch.kind == TRANSFERS else launch.seconds(self.rates)
        self.add(Work(flops, launches=launch.times, seconds=seconds))

    def travels(self, name: str, args: Sequence[Any]) -> None:
        """Add an operation of a process group, by torch's name for it."""
        size = sent_bytes(name, args)
        if self.in_optimizer:
            self.add(Work(optimizer=size))
        elif self.in_context:
            if name == "alltoall_base_":  # of equal parts, of which a rank keeps its own
                ranks = dist.ProcessGroup.unbox(args[2]).size()
                size = size * (ranks - 1) // ranks
            self.add(Work(context=size))
        elif name == "send":
            self.add(Work(pipeline=size))
        elif self.in_micro_batch and name.startswith("alltoall"):
            self.add(Work(experts=size))
        else:
            self.add(Work(parameters=size))


def sent_bytes(name: str, args: Sequence[Any]) -> int:
    """Return the bytes that a rank sends in an operation of a process group, by torch's name for
    it; 0 for receives and waits."""
    sizes = [sum(map(nbytes, tensors_in(x))) for x in (*args[:2], (), ())]
    if name in ("_allgather_base_", "allgather_"):
        return sizes[0] - sizes[1]  # in a ring, a rank forwards all parts but the last
    if name in ("_reduce_scatter_base_", "reduce_scatter_"):
        return sizes[1] - sizes[0]
    if name == "allreduce_":
        ranks = dist.ProcessGroup.unbox(args[1]).size()
        return 2 * sizes[0] * (ranks - 1) // ranks  # a reduce-scatter and an all-gather
    if name in ("alltoall_base_", "alltoall_"):
        return sizes[1]
    return sizes[0] if name in ("send", "broadcast_") else 0
