"""Runs dry runs in processes of their own, since torch caches meshes for a whole process and each run has another mesh."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lather.config.config import Config
from lather.planning.dry_run import FIRST, SAVE, STEP, RankRun, run_rank
from lather.processes import end_with_parent
from lather.standin.device import module, standin
from lather.torch_private import IMPORTED_LATE

Device = Literal["gpu", "cpu"]

POINTS = 1500
"""Points of each curve that are kept."""


def worker_processes() -> ProcessPoolExecutor:
    """Return a pool with as many processes as cores; a process runs one call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lather.planning.dry_run", IMPORTED_LATE])
    return ProcessPoolExecutor(os.cpu_count() or 1, context, end_with_parent, max_tasks_per_child=1)


@dataclass(frozen=True)
class Assumed:
    """Assumptions of a dry run about devices and the load of the experts."""

    device: Device = "gpu"
    imbalance: float = 1.0
    """Rows of the experts of the busiest rank, relative to an even load."""
    memory: int | None = None
    """Bytes of a GPU; the optimizer sizes its batches by the free part. None: an H200's."""


def dry_run(
    config: Config,
    world_size: int,
    assumed: Assumed,
    rank: int,
    *,
    do: Collection[str] = (FIRST, SAVE, STEP),
    layers: Sequence[Sequence[int]] | None = None,
) -> RankRun:
    """Call `run_rank`, in a process that is used for this call alone."""
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels would read values
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module.memory = assumed.memory or module.memory
    device = standin(assumed.device)
    return run_rank(config, world_size, rank, device, imbalance=assumed.imbalance, do=do, layers=layers)


def thinned_dry_run(
    config: Config, world_size: int, assumed: Assumed, rank: int, *, layers: Sequence[Sequence[int]] | None = None
) -> RankRun:
    """Call `dry_run`, and keep `POINTS` points of each timeline, including its peak."""
    found = dry_run(config, world_size, assumed, rank, layers=layers)
    return replace(found, steps={name: timeline.thinned(POINTS) for name, timeline in found.steps.items()})
