"""A training run's memory, rank by rank: a dry run of one rank at each pipeline position, each in a process of its own.

Ranks at one position differ in what they have least: rows are dealt out so that the first one has most of every parameter, and whole
matrices go to owners by cost. So the first data rank is run, and, where another owns more optimizer state, that one, too.

What a dry run does not see is added as an allowance, which is an assumption and no measurement: a GPU's context, libraries and
communication buffers, and fragmentation.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from lather.memory.dry_run import FIRST, STEP, WALKED_MICRO_BATCHES, RankRun, run_rank
from lather.standin.device import module, standin
from lather.train.config import Config, check_parallel

CONTEXT_BYTES = 3 * 2**29
"""Allowance on a GPU: CUDA's context and kernels, cuBLAS's workspace, NCCL's buffers."""
FRAGMENTATION = 0.03
"""Allowance on a GPU, as a share of the peak: memory that the allocator holds and cannot give out."""

POINTS = 1500
"""Of each curve that is kept."""


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory."""

    world_size: int
    device: Literal["gpu", "cpu"]
    imbalance: float
    ranks: tuple[RankRun, ...]
    """The one with the largest peak of each pipeline position."""

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


def plan(
    config: Config, world_size: int, device: Literal["gpu", "cpu"] = "gpu", *, imbalance: float = 1.0, memory: int | None = None
) -> MemoryPlan:
    """The memory of `world_size` ranks that train with this configuration.

    Args:
        device: the kind of device that each rank has.
        imbalance: rows of the busiest rank's experts, relative to an even load.
        memory: bytes of a GPU, by whose free part the optimizer chooses how much it works on at a time; None: an H200's.

    Raises ConfigError if the ranks cannot be divided as the configuration says.
    """
    check_parallel(config, world_size)
    per_position = world_size // config.parallel.pp
    firsts = [position * per_position for position in range(config.parallel.pp)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(firsts), os.cpu_count() or 1), context, max_tasks_per_child=1) as pool:
        run = partial(dry_run_here, config, world_size, device, imbalance, memory)
        runs = list(pool.map(run, firsts))
        runs += pool.map(run, list(_others(runs)))
    by_position = [max((run for run in runs if run.pp_rank == position), key=lambda run: run.peak) for position in range(len(firsts))]
    return MemoryPlan(world_size, device, imbalance, tuple(by_position))


def _others(runs: list[RankRun]) -> Iterator[int]:
    """The rank at each position with the most optimizer state, where it is another than the one that was run."""
    for run in runs:
        own = run.state_bytes.get(run.rank, 0)
        rank = max(run.state_bytes, key=lambda rank: run.state_bytes[rank], default=run.rank)
        if run.state_bytes.get(rank, 0) > own:
            yield rank


def dry_run_here(
    config: Config,
    world_size: int,
    device: Literal["gpu", "cpu"],
    imbalance: float,
    memory: int | None,
    rank: int,
    do: Collection[str] = (FIRST, STEP),
    walked: int = WALKED_MICRO_BATCHES,
) -> RankRun:
    """`run_rank` in a process of its own; of each timeline some points are kept."""
    os.environ.pop("TRITON_INTERPRET", None)  # kernels that are interpreted would look at values
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module.memory = memory or module.memory
    found = run_rank(config, world_size, rank, standin(device), imbalance=imbalance, do=do, walked=walked)
    return replace(found, steps={name: timeline.thinned(POINTS) for name, timeline in found.steps.items()})


def allowance_for(peak: float, device: Literal["gpu", "cpu"]) -> int:
    """Bytes beside a rank's peak."""
    return CONTEXT_BYTES + int(FRAGMENTATION * peak) if device == "gpu" else 0
