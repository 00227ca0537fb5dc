"""Refreshes that are done between a step and the next step (`async_refresh`).

On a GPU they are launched on a side stream immediately and run during the next forward and backward
pass. A caller with other work to do can defer them instead (`deferred`) and do one batch at a time,
by `work`, between two parts of its own work. The next step, and everything that reads the state,
first does the rest (`finish`). Between two steps nothing else reads or changes factors, bases and
moments, so results do not depend on when a batch was done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from lather.device import gpu_module, is_gpu
from lather.optim.batched.buckets import Bucket, States
from lather.optim.batched.plan import close_buckets, open_buckets
from lather.optim.batched.refresh import Counts, DimRefresh, Launched, finish, launch
from lather.optim.batched.streams import SideStreams, beside, join, no_autocast


class PendingRefreshes:
    """The refreshes of an optimizer that are not finished yet, in order."""

    def __init__(self, optimizer: torch.optim.Optimizer, counts: Counts) -> None:
        self._optimizer = weakref.ref(optimizer)  # otherwise both would form a cycle
        self._counts, self._streams = counts, SideStreams()
        self.waiting: deque[DimRefresh] = deque()
        """Batches that have not been started."""
        self.launched: Launched = []
        """Refreshes that have been launched: a GPU may still work on them; a CPU has done them, but
        failures have not been handled."""
        self._end: Any = None
        """Event at the end of the batch that was launched last, on a GPU."""
        self.deferred = False
        """Whether batches wait for the caller's `work`; otherwise all are launched when they are
        added."""

    def __len__(self) -> int:
        """Number of batches that have not been started."""
        return len(self.waiting)

    def add(self, jobs: list[DimRefresh]) -> None:
        """Add refreshes to be done."""
        if self.deferred:
            self.waiting.extend(batch for job in jobs for batch in job.batches())
        elif jobs:
            self._launch(jobs)

    @property
    def is_busy(self) -> bool:
        """Whether a GPU still works on the batch that was launched last."""
        return self._end is not None and not self._end.query()

    def work(self) -> None:
        """Do the next batch that waits, or launch it on the GPU."""
        self._launch([self.waiting.popleft()])

    def finish(self) -> None:
        """Do all remaining batches, wait for the device, and retry refreshes that failed."""
        while self.waiting:
            self.work()
        launched = self.launched
        self.forget()
        with torch.no_grad(), no_autocast(), self._opened(job for job, _ in launched):
            finish(launched, self._counts)

    def forget(self) -> None:
        """Wait for the device, and drop all refreshes: they are done, or the state has been
        replaced."""
        join(self._streams)
        self.waiting.clear()
        self.launched, self._end = [], None

    def _launch(self, jobs: list[DimRefresh]) -> None:
        with (
            record_function("lather.optim.launch_refresh"),
            torch.no_grad(),
            no_autocast(),
            self._opened(jobs) as buckets,
        ):
            changed = [stack for bucket in buckets for stack in bucket.stacks.values()]
            device = jobs[0].run.bucket.device
            with beside(self._streams, changed, device):
                self.launched += launch(jobs, self._counts)
                if is_gpu(device):
                    self._end = gpu_module(device).current_stream().record_event()

    @contextmanager
    def _opened(self, jobs: Iterable[DimRefresh]) -> Iterator[list[Bucket]]:
        """Have the buckets of the refreshes open inside the block, also if the state was moved,
        replaced or deleted since the last step."""
        optimizer = self._optimizer()
        state: States = {} if optimizer is None else optimizer.state
        buckets = list({id(job.run.bucket): job.run.bucket for job in jobs}.values())
        try:
            for bucket in buckets:
                open_buckets([bucket], state if bucket.is_stacked(state) else bucket.stack(state))
            yield buckets
        finally:
            close_buckets(buckets)
