"""Refreshes that a step leaves to be done before the next one (`async_refresh`), and who does them when.

On a GPU they are given to a side stream at once and run beside the next forward and backward. A caller that sometimes waits for other
ranks asks for them in pieces instead (`put_off`) and does one with `work` whenever it would be idle. The next step, and whoever reads the
state, first does what is left (`finish`). Between two steps nothing else touches factors, bases and moments, so the numbers do not depend
on who did which piece when.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler import record_function

from lather.device import gpu_module, is_gpu
from lather.optim.engine.refresh import Count, DimRefresh, Launched, finish, launch
from lather.optim.engine.streams import SideStreams, beside, join, no_autocast

CPU_PIECE_FLOPS = 2e8
"""Flops of a piece on a CPU, about; a piece is one matrix at least. Some milliseconds: a rank whose input has come meanwhile lets it wait
for so long, and smaller batches are slower."""

FIRST_RATE = 1e10
"""Flops per second that a piece is expected to have before any was timed."""


class PendingRefreshes:
    """The refreshes of one optimizer that are still to be done, in order."""

    def __init__(self, count: Count, under_precision: Callable[[str], AbstractContextManager[None]]) -> None:
        """`under_precision` sets the fp32 matmul precision that a rule asks for."""
        self._count, self._under_precision, self._streams = count, under_precision, SideStreams()
        self.waiting: deque[tuple[str, DimRefresh]] = deque()
        """Pieces that nobody has begun, and the precision of each."""
        self.launched: list[tuple[str, Launched]] = []
        """Refreshes that are launched: on a GPU under way, on a CPU done but for a look at what failed."""
        self._last: Any = None
        """The event at the end of the last piece, on a GPU."""
        self._rate = FIRST_RATE
        self.put_off = False
        """Whether a caller does the pieces; else all are done or given to the device when they are added."""

    def __len__(self) -> int:
        """Pieces that nobody has begun."""
        return len(self.waiting)

    def add(self, precision: str, jobs: Iterable[DimRefresh]) -> None:
        """Leave `jobs` to be done under this fp32 matmul precision."""
        if self.put_off:
            self.waiting.extend((precision, piece) for job in jobs for piece in _pieces(job))
        else:
            self._launch(precision, list(jobs))

    @property
    def is_busy(self) -> bool:
        """Whether a GPU is still at the piece that it was given last."""
        return self._last is not None and not self._last.query()

    def next_seconds(self) -> float:
        """How long the next piece will take on a CPU, by the rate of the last."""
        return _flops(self.waiting[0][1]) / self._rate

    def work(self) -> None:
        """Do the next piece, or give it to the GPU; there must be one."""
        precision, piece = self.waiting.popleft()
        start = time.perf_counter()
        self._launch(precision, [piece])
        self._rate = _flops(piece) / (time.perf_counter() - start)

    def finish(self) -> None:
        """Do what is left, wait for what is under way, and try again what failed."""
        while self:
            self.work()
        if self.launched:
            join(self._streams)
        launched, self.launched, self._last = self.launched, [], None
        by_precision: dict[str, Launched] = {}
        for precision, batches in launched:
            by_precision.setdefault(precision, []).extend(batches)
        for precision, batches in by_precision.items():
            with torch.no_grad(), self._under_precision(precision), no_autocast():
                finish(batches, self._count)

    def forget(self) -> None:
        """Drop everything: the state that it was for is replaced."""
        join(self._streams)
        self.waiting.clear()
        self.launched, self._last = [], None

    def _launch(self, precision: str, jobs: list[DimRefresh]) -> None:
        changed = [stack for job in jobs for stack in job.run.bucket.stacks.values()]
        device = jobs[0].run.bucket.device
        arithmetic = torch.no_grad(), no_autocast(), self._under_precision(precision)
        with record_function("lather.optim.launch_refresh"), ExitStack() as stack:
            for setting in (*arithmetic, beside(self._streams, changed, device)):
                stack.enter_context(setting)
            self.launched.append((precision, launch(jobs, self._count)))
            if is_gpu(device):
                self._last = gpu_module(device).current_stream().record_event()


def _pieces(job: DimRefresh) -> Iterator[DimRefresh]:
    """The batches of a job; on a CPU cut into pieces that take a short time each."""
    for batch in job.batches():
        count = len(batch.rows)
        if not is_gpu(batch.run.bucket.device):
            count = max(1, int(CPU_PIECE_FLOPS * count / _flops(batch)))
        for first in range(0, len(batch.rows), count):
            yield replace(batch, rows=batch.rows[first : first + count])


def _flops(batch: DimRefresh) -> float:
    """The arithmetic of a refresh by Cholesky-QR and of turning a moment, to first order."""
    inner, n = batch.run.bucket.inner, batch.run.bucket.inner[batch.dim]
    return len(batch.rows) * (8.0 * n**3 + 4.0 * n * math.prod(inner))
