"""Refreshes that are done between a step and the next one (`async_refresh`).

On a GPU they are launched on a side stream immediately and run during the next forward and backward
pass. A caller with other work to do can defer them instead (`deferred`) and do one batch at a time,
by `work`, between two pieces of its own. The next step, and everything that reads the state,
first does the rest (`finish`). Between two steps nothing else reads or changes factors, bases and
moments, so results do not depend on when a piece was done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
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
    """The refreshes of one optimizer that are not finished yet, in order."""

    def __init__(self, counts: Counts, state: Callable[[], States]) -> None:
        """`state`: function that returns the state of the optimizer, which the user may replace."""
        self._counts, self._state, self._streams = counts, state, SideStreams()
        self.waiting: deque[DimRefresh] = deque()
        """Pieces that have not been started."""
        self.launched: Launched = []
        """Refreshes that have been launched: a GPU may still work on them; a CPU has done them, but
        failures have not been handled."""
        self._last: Any = None
        """Event at the end of the last piece, on a GPU."""
        self.deferred = False
        """Whether pieces wait for the caller's `work`; otherwise all are launched when they are
        added."""

    def __len__(self) -> int:
        """Number of pieces that have not been started."""
        return len(self.waiting)

    def add(self, jobs: list[DimRefresh]) -> None:
        """Add refreshes to be done."""
        if self.deferred:
            self.waiting.extend(piece for job in jobs for piece in job.batches())
        elif jobs:
            self._launch(jobs)

    @property
    def is_busy(self) -> bool:
        """Whether a GPU still works on the piece that was launched last."""
        return self._last is not None and not self._last.query()

    def work(self) -> None:
        """Do the next piece, or launch it on the GPU; there must be one."""
        self._launch([self.waiting.popleft()])

    def finish(self) -> None:
        """Do all remaining pieces, wait for the device, and retry refreshes that failed."""
        while self:
            self.work()
        if self.launched:
            join(self._streams)
        launched, self.launched, self._last = self.launched, [], None
        buckets = {id(job.run.bucket): job.run.bucket for job, _ in launched}.values()
        with torch.no_grad(), no_autocast(), _opened(buckets, self._state()):
            finish(launched, self._counts)

    def forget(self) -> None:
        """Drop all refreshes, because the state has been replaced."""
        join(self._streams)
        self.waiting.clear()
        self.launched, self._last = [], None

    def _launch(self, jobs: list[DimRefresh]) -> None:
        buckets = {id(job.run.bucket): job.run.bucket for job in jobs}.values()
        with (
            record_function("lather.optim.launch_refresh"),
            torch.no_grad(),
            no_autocast(),
            _opened(buckets, self._state()),
        ):
            changed = [stack for bucket in buckets for stack in bucket.stacks.values()]
            device = jobs[0].run.bucket.device
            with beside(self._streams, changed, device):
                self.launched += launch(jobs, self._counts)
                if is_gpu(device):
                    self._last = gpu_module(device).current_stream().record_event()


@contextmanager
def _opened(buckets: Collection[Bucket], state: States) -> Iterator[None]:
    """Have the buckets open inside the block, also if the state of members was moved or deleted
    since the last step."""
    try:
        for bucket in buckets:
            whole = state if bucket.is_stacked(state) else bucket.stack(state)
            open_buckets([bucket], whole)
        yield
    finally:
        close_buckets(buckets)
