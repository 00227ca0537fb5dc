"""Records when a rank executes the actions of a step, on one clock for all ranks, for the picture
and for `replay`.

An action starts when its input has arrived, so it does not include waits for other ranks. An
overlapped pair may have to wait for its second input; it is then recorded as two events, before and
after the wait.

On CUDA the times are those of the compute stream, from events that are read after the step, so the
host never waits in between. Communication on other streams is not counted. Every action is also an
NVTX range for profilers, whether times are recorded or not.

Clocks start at a barrier. They differ by the time in which ranks leave it, fractions of a
millisecond on one machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lather.device import gpu_module, is_gpu
from lather.files import names_full_disk
from lather.pipeline.recorder import Recorder
from lather.pipeline.replay import Event
from lather.pipeline.schedule import Action

FILE = "timeline.jsonl"
"""Name of the file in a run directory."""

Moment = Any
"""Seconds on a CPU, a stream's event on a GPU."""


class TimelineRecorder(Recorder):
    """Records the actions of one rank between `begin` and `end`; given to `Executor` as
    `record`."""

    def __init__(self, device: torch.device, rank: int = 0, num_ranks: int = 1) -> None:
        """`num_ranks`: size of the default process group, which is not needed for one rank."""
        self.device, self.rank, self.num_ranks = device, rank, num_ranks
        self._origin: Moment = 0.0
        self._spans: list[tuple[Action, Moment, Moment]] | None = None
        """Recorded actions or parts of them, with start and end; None while nothing is recorded."""
        self._current: tuple[Action, Moment] | None = None

    def begin(self) -> None:
        """Start the clock on all ranks at once; every rank calls this."""
        self._synchronize()
        if self.num_ranks > 1:
            dist.all_reduce(torch.zeros(()))
        self._spans, self._current = [], None
        self._origin = self._now()

    def end(self) -> list[Event]:
        """Return the events since `begin` in order, with times in seconds. Waits for the device."""
        self._synchronize()
        spans, self._spans = self._spans or [], None
        return [
            Event(self.rank, action, self._seconds(start), self._seconds(end))
            for action, start, end in spans
        ]

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Record an action around the block."""
        nvtx = gpu_module(self.device).nvtx.range(str(action)) if is_gpu(self.device) else None
        with nvtx or nullcontext():
            if self._spans is None:
                yield
                return
            self._current = (action, self._now())
            yield
            self._close_span()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude a wait for another rank, inside an action."""
        if self._spans is None or self._current is None:
            yield
            return
        action, _ = self._current
        self._close_span()
        yield
        self._current = (action, self._now())

    def _close_span(self) -> None:
        assert self._spans is not None
        assert self._current is not None
        self._spans.append((*self._current, self._now()))
        self._current = None

    def _synchronize(self) -> None:
        if is_gpu(self.device):
            gpu_module(self.device).synchronize(self.device)

    def _now(self) -> Moment:
        if not is_gpu(self.device):
            return time.perf_counter()
        event = gpu_module(self.device).Event(enable_timing=True)
        event.record(gpu_module(self.device).current_stream(self.device))
        return event

    def _seconds(self, moment: Moment) -> float:
        return (
            moment - self._origin
            if isinstance(moment, float)
            else self._origin.elapsed_time(moment) / 1000
        )


def append_timeline(path: Path, step: int, events: Iterable[Event]) -> None:
    """Append the events of all ranks in a step to a `timeline.jsonl`, for
    `lather.pipeline.picture.read_timeline`: a line per event, times in seconds."""
    rows = [
        {
            "step": step,
            "rank": event.rank,
            "action": str(event.action),
            "start": round(event.start, 9),
            "end": round(event.end, 9),
        }
        for event in events
    ]
    with names_full_disk(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
