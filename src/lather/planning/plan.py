"""Plans the memory of a training run, rank by rank: dry-runs one rank at each pipeline position, each in a process of its own.

Ranks at the same position differ little: the first one has the most rows of every parameter, and whole matrices are assigned to owners by
cost. So the first data rank is run, and also the rank that owns the most optimizer state, if that is another one.

An allowance is added for memory that a dry run does not see: a GPU's context, libraries and communication buffers, and fragmentation. It is
assumed, not measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from lather.config.config import Config, check_parallel
from lather.pipeline.partition import Partition
from lather.pipeline.replay import bubble_of_layers
from lather.planning.dry_run import RankRun, data_ranks
from lather.planning.stage_bytes import memory_partition
from lather.planning.workers import Assumed, Device, thinned_dry_run, worker_processes

CONTEXT_BYTES = 3 * 2**29
"""Allowance on a GPU for CUDA's context and kernels, cuBLAS's workspace and NCCL's buffers."""
FRAGMENTATION = 0.03
"""Allowance on a GPU, as a fraction of the peak, for memory that the allocator holds but cannot use."""


@dataclass(frozen=True)
class MemoryPlan:
    """The planned memory of a run."""

    world_size: int
    device: Device
    imbalance: float
    ranks: tuple[RankRun, ...]
    """The rank with the largest peak at each pipeline position."""
    partition: Partition | None = None
    """The partition, if layers were assigned by memory."""
    num_micro_batches: int = 1
    """Micro-batches of a data rank in a step."""
    asynchronous: bool = False
    """Whether checkpoints are written from copies while training continues."""
    early_weight_gradients: bool = False
    """Whether weight gradients are computed as early as possible (`parallel.schedule_memory`)."""

    @property
    def largest(self) -> RankRun:
        return max(self.ranks, key=lambda run: run.peak)

    @property
    def allowance(self) -> int:
        """Bytes in addition to the largest rank's peak."""
        return allowance_for(self.largest.peak, self.device)

    @property
    def needed(self) -> int:
        """Bytes of the device that the largest rank needs."""
        return self.largest.peak + self.allowance

    @property
    def peaks_where_weight_gradients_wait(self) -> bool:
        """Whether the largest rank needs most while it leaves weight gradients for later, which `parallel.schedule_memory` can change."""
        timeline = self.largest.steps[self.largest.peak_step]
        doing = timeline.doing_at(timeline.peak_time)
        return not self.early_weight_gradients and re.search(r"\d[IW]\d", doing) is not None

    def bubbles(self, partition: Partition) -> tuple[float, float]:
        """Return the fraction of a step in which a pipeline rank waits, if all layers take equally long: with this partition, and with the
        uniform one."""
        return self._bubble(partition.layers, self.early_weight_gradients), self._bubble(partition.uniform_layers, False)

    def bubbles_of_weight_gradients(self) -> tuple[float, float]:
        """Return the same fraction with the layers of this plan: with weight gradients as early as possible, and with the normal table."""
        own = [run.layers for run in self.ranks]
        layers = (*(len(first) for first, _ in own), *(len(second) for _, second in reversed(own)))
        return self._bubble(layers, True), self._bubble(layers, False)

    def _bubble(self, layers: tuple[int, ...], early: bool) -> float:
        return bubble_of_layers(layers, self.num_micro_batches, early_weight_gradients=early)


def plan(
    config: Config,
    world_size: int,
    device: Device = "gpu",
    *,
    imbalance: float = 1.0,
    memory: int | None = None,
    partition: Partition | None = None,
) -> MemoryPlan:
    """Plan the memory of `world_size` ranks that train with this configuration.

    Args:
        device: kind of device that the ranks have.
        imbalance: rows of the experts of the busiest rank, relative to an even load.
        memory: bytes of a GPU; the optimizer sizes its batches by the free part. None: an H200's.
        partition: result of `memory_partition` for these arguments, if known; None: it is computed.

    Raises ConfigError if the ranks cannot be divided as the configuration says.
    """
    check_parallel(config, world_size)
    assumed = Assumed(device, imbalance, memory)
    if partition is None:
        partition = memory_partition(config, world_size, assumed)
    per_position = world_size // config.parallel.pp
    firsts = [position * per_position for position in range(config.parallel.pp)]
    layers = None if partition is None else partition.stages
    run = partial(thinned_dry_run, config, world_size, assumed, layers=layers)
    with worker_processes() as pool:
        runs = list(pool.map(run, firsts))
        runs += pool.map(run, list(_others(runs)))
    by_position = [max((run for run in runs if run.pp_rank == position), key=lambda run: run.peak) for position in range(len(firsts))]
    number = config.num_micro_batches(data_ranks(config, world_size))
    return MemoryPlan(
        world_size,
        device,
        imbalance,
        tuple(by_position),
        partition,
        number,
        asynchronous=config.checkpoint.asynchronous,
        early_weight_gradients=config.parallel.early_weight_gradients,
    )


def _others(runs: list[RankRun]) -> Iterator[int]:
    """Yield, for each position, the rank with the most optimizer state if it is not the one that was run."""
    for run in runs:
        own = run.state_bytes.get(run.rank, 0)
        rank = max(run.state_bytes, key=lambda rank: run.state_bytes[rank], default=run.rank)
        if run.state_bytes.get(rank, 0) > own:
            yield rank


def allowance_for(peak: float, device: Device) -> int:
    """Return the bytes needed in addition to a rank's peak."""
    return CONTEXT_BYTES + int(FRAGMENTATION * peak) if device == "gpu" else 0
