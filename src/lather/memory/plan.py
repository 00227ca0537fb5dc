"""Plans the memory of a training run: dry-runs a rank at each pipeline position, in parallel.

Ranks at the same position differ little: the first has the most rows of every parameter, and whole
matrices are assigned to owners by cost. So the first data rank is run, and also the rank that owns
the most optimizer state, if that is another.

An allowance is added for memory that a dry run does not see: a GPU's context, libraries and
communication buffers, and fragmentation. It is assumed, not measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.engine.settings import fp8_error
from lather.kernels.block_scaled import LEAST_CAPABILITY
from lather.memory.dry_run import HostMemory, RankRun, dry_run
from lather.memory.stage_bytes import memory_partition
from lather.memory.work import MICRO_BATCHES, REFRESH, REST, Work
from lather.memory.workers import Assumed, Device, worker_processes
from lather.pipeline.partition import Partition, uniform
from lather.pipeline.replay import bubble_of_layers
from lather.time_model.rates import RateTable

CONTEXT_BYTES = 3 * 2**29
"""Allowance on a GPU for CUDA's context and kernels, cuBLAS's workspace and NCCL's buffers."""
FRAGMENTATION = 0.03
"""Allowance on a GPU, as a fraction of the peak, for memory that the allocator holds but cannot
use; with expandable segments (`lather.allocator`) that is little."""

POINTS = 3000
"""Points that a plan has of each curve."""


@dataclass(frozen=True)
class MemoryPlan:
    """The planned memory of a run."""

    config: Config
    world_size: int
    assumed: Assumed
    ranks: tuple[RankRun, ...]
    """The rank with the largest peak at each pipeline position."""
    partition: Partition | None = None
    """The partition, if layers were assigned by memory."""

    @property
    def largest(self) -> RankRun:
        return max(self.ranks, key=lambda run: run.peak)

    @property
    def allowance(self) -> int:
        """Bytes in addition to the largest rank's peak."""
        return allowance_for(self.largest.peak, self.assumed.device)

    @property
    def needed(self) -> int:
        """Bytes of the device that the largest rank needs."""
        return self.largest.peak + self.allowance

    @property
    def refresh_interval(self) -> int:
        """Steps from refresh to refresh."""
        interval: int = getattr(self.config.optim, "precondition_frequency", 1)
        return interval

    @property
    def work(self) -> Work:
        """Work of a step of the first pipeline rank, including its share of a refresh."""
        when = self.ranks[0].work
        refresh = when.get(REFRESH, Work()) * (1 / self.refresh_interval)
        return sum((when.get(name, Work()) for name in (MICRO_BATCHES, REST)), refresh)

    @property
    def host(self) -> HostMemory:
        """Memory that the rank with the most of it needs of its host."""
        return max((run.host for run in self.ranks), key=lambda host: host.pinned)

    @property
    def bus(self) -> tuple[float, float]:
        """Bytes of state that are fetched to a device in a step, and that are written back, on
        average over the steps from refresh to refresh."""
        kept = 1 - 1 / self.refresh_interval
        return self.host.visiting, self.host.visiting - self.host.bases * kept

    @property
    def frozen(self) -> float:
        """Bytes of frozen weights that are fetched to a device in a step with all micro-batches."""
        return max(sum(work.frozen for work in run.work.values()) for run in self.ranks)

    @property
    def peaks_where_weight_gradients_wait(self) -> bool:
        """Whether the largest rank needs most while it leaves weight gradients for later, which
        `parallel.schedule_memory` can change."""
        is_early = self.config.parallel.schedule_memory == "least"
        return not is_early and re.search(r"\d[IW]\d", self.largest.largest.when) is not None

    def bubble(self, layers: tuple[int, ...] | None = None, *, early: bool | None = None) -> float:
        """Return the fraction of a step in which a pipeline rank waits, if all layers take equally
        long, with so many layers on the stages, and weight gradients as early as possible or not;
        None: as planned."""
        parallel = self.config.parallel
        if parallel.resolved_schedule != "dualpipev" or parallel.pp == 1:
            return 0.0
        model = self.config.model
        num_mtp = model.num_nextn_predict_layers
        if layers is None:
            uniform_layers = uniform(model.num_hidden_layers, 2 * parallel.pp, num_mtp)
            layers = self.partition.layers if self.partition else uniform_layers
        return bubble_of_layers(
            (*layers[:-1], layers[-1] + num_mtp),
            self.config.num_micro_batches(parallel.data_ranks(self.world_size)),
            early_weight_gradients=parallel.schedule_memory == "least" if early is None else early,
        )


def plan(
    config: Config,
    world_size: int,
    assumed: Assumed,
    partition: Partition | None = None,
    *,
    pool: ProcessPoolExecutor | None = None,
) -> MemoryPlan:
    """Plan the memory of `world_size` ranks that train with this configuration.

    `partition`: result of `memory_partition` for these arguments, if known; None: it is computed.
    `pool`: processes that several plans share; None: the plan starts some. Raises ConfigError if
    the ranks cannot be divided as the configuration says, or their device cannot compute so.
    """
    check_parallel(config, world_size)
    check_device(config, assumed.rate_table)
    if pool is None:
        with worker_processes() as workers:
            return plan(config, world_size, assumed, partition, pool=workers)
    if partition is None:
        partition = memory_partition(config, world_size, assumed)
    firsts = range(0, world_size, world_size // config.parallel.pp)
    run = partial(
        _thinned_dry_run,
        config,
        world_size,
        assumed,
        None if partition is None else partition.stages,
    )
    runs = list(pool.map(run, firsts))
    runs += pool.map(run, [_largest_owner(run) for run in runs if run.missing_state])
    largest = tuple(
        max((run for run in runs if run.pp_rank == position), key=lambda run: run.peak)
        for position in range(config.parallel.pp)
    )
    return MemoryPlan(config, world_size, assumed, largest, partition)


def check_device(config: Config, rates: RateTable) -> None:
    """Raise the ConfigError of a run on the device of these rates, if it lacks what the
    configuration needs."""
    lacks_fp8 = rates.capability is not None and rates.capability < LEAST_CAPABILITY
    if config.train.fp8 == "block" and lacks_fp8:
        raise fp8_error(rates.name)


def _thinned_dry_run(
    config: Config, world_size: int, assumed: Assumed, layers: Sequence[range] | None, rank: int
) -> RankRun:
    """Dry-run a rank, and thin its timelines to `POINTS` points, including the peak."""
    run = dry_run(config, world_size, assumed, rank, layers=layers)
    return replace(
        run, steps={name: timeline.thinned(POINTS) for name, timeline in run.steps.items()}
    )


def _largest_owner(run: RankRun) -> int:
    """Return the rank at the position of `run` that owns the most optimizer state."""
    return max(run.state_bytes, key=run.state_bytes.__getitem__)


def allowance_for(peak: float, device: Device) -> int:
    """Return the bytes needed in addition to a rank's peak."""
    return CONTEXT_BYTES + int(FRAGMENTATION * peak) if device == "gpu" else 0
