"""A training run's memory, rank by rank: a dry run of one rank at each pipeline position, each in a process of its own.

Ranks at one position differ in what they have least: rows are dealt out so that the first one has most of every parameter, and whole
matrices go to owners by cost. So the first data rank is run, and, where another owns more optimizer state, that one, too.

What a dry run does not see is added as an allowance, which is an assumption and no measurement: a GPU's context, libraries and
communication buffers, and fragmentation.
"""

from __future__ import annotations

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
"""Allowance on a GPU: CUDA's context and kernels, cuBLAS's workspace, NCCL's buffers."""
FRAGMENTATION = 0.03
"""Allowance on a GPU, as a share of the peak: memory that the allocator holds and cannot give out."""


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory."""

    world_size: int
    device: Device
    imbalance: float
    ranks: tuple[RankRun, ...]
    """The one with the largest peak of each pipeline position."""
    partition: Partition | None = None
    """Where the layers were dealt by memory."""
    num_micro_batches: int = 1
    """Micro-batches of a data rank in a step."""
    asynchronous: bool = False
    """Whether checkpoints are written while training goes on, from copies."""

    @property
    def largest(self) -> RankRun:
        return max(self.ranks, key=lambda run: run.peak)

    @property
    def allowance(self) -> int:
        """Bytes beside the largest rank's peak."""
        return allowance_for(self.largest.peak, self.device)

    @property
    def needed(self) -> int:
        """Bytes of the device that the largest rank needs."""
        return self.largest.peak + self.allowance

    def bubbles(self, partition: Partition) -> tuple[float, float]:
        """The share of a step in which a pipeline rank waits, if all layers take equally long: with these layers on the stages, and with
        equally many."""
        bubble, uniform_bubble = (bubble_of_layers(one, self.num_micro_batches) for one in (partition.layers, partition.uniform_layers))
        return bubble, uniform_bubble


def plan(
    config: Config,
    world_size: int,
    device: Device = "gpu",
    *,
    imbalance: float = 1.0,
    memory: int | None = None,
    partition: Partition | None = None,
) -> MemoryPlan:
    """The memory of `world_size` ranks that train with this configuration.

    Args:
        device: the kind of device that each rank has.
        imbalance: rows of the busiest rank's experts, relative to an even load.
        memory: bytes of a GPU, by whose free part the optimizer chooses how much it works on at a time; None: an H200's.
        partition: what `memory_partition` found for these arguments, if that is known; None: it is asked.

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
    return MemoryPlan(world_size, device, imbalance, tuple(by_position), partition, number, config.checkpoint.asynchronous)


def _others(runs: list[RankRun]) -> Iterator[int]:
    """The rank at each position with the most optimizer state, where it is another than the one that was run."""
    for run in runs:
        own = run.state_bytes.get(run.rank, 0)
        rank = max(run.state_bytes, key=lambda rank: run.state_bytes[rank], default=run.rank)
        if run.state_bytes.get(rank, 0) > own:
            yield rank


def allowance_for(peak: float, device: Device) -> int:
    """Bytes beside a rank's peak."""
    return CONTEXT_BYTES + int(FRAGMENTATION * peak) if device == "gpu" else 0
