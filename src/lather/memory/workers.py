"""Starts a process for each dry run, since torch caches meshes for a whole process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from lather.cores import num_cores
from lather.processes import end_with_parent, without_signals
from lather.time_model.rates import DEFAULT_RATES, RATES, RateTable
from lather.torch_private import IMPORTED_LATE

Device = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class Assumed:
    """Assumptions of a dry run about devices and the load of the experts."""

    device: Device = "gpu"
    """Kind of device that the ranks have."""
    imbalance: float = 1.0
    """Rows of the experts of the busiest rank, relative to an even load."""
    memory: int | None = None
    """Bytes of a GPU. None: an H200's."""
    rates: str = ""
    """Key of `RATES`, the tables of rates of the time model; empty: of the kind of device."""
    measured: RateTable | None = None
    """Rates that `lather doctor` has measured, in place of those that `rates` names."""

    @property
    def rate_table(self) -> RateTable:
        return self.measured or RATES[self.rates or DEFAULT_RATES[self.device]]


@contextmanager
def worker_processes() -> Iterator[ProcessPoolExecutor]:
    """Make a pool with as many processes as cores, which end after a call each. Calls that wait for
    a process at the end of the block are dropped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lather.memory.dry_run", IMPORTED_LATE])
    pool = ProcessPoolExecutor(num_cores(), context, end_with_parent, max_tasks_per_child=1)
    try:
        with without_signals():  # processes start when there is something to do
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)
