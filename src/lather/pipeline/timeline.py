"""Records when a rank executes the actions of a step, on one clock for all ranks, for the picture
and for `replay`.

An action starts when its input has arrived, so it does not include waits for other ranks. An
overlapped pair may have to wait for its second input; it is then recorded as two events, before and
after the wait.

Parameters that are gathered block by block are waited for inside an action. Gathers and sums of
gradients are events of their own, beside the action's: from their start until the last of their
operations is done.

On CUDA the times are those of the compute stream, and for gathers and sums those of their streams,
from events that are read after the step, so the host never waits in between. Other communication is
not counted. Every action is also an NVTX range for profilers, whether times are recorded or not.

Clocks start at a barrier. They differ by the time in which ranks leave it, fractions of a
millisecond on one machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lather.device import gpu_module, is_gpu
from lather.files import names_failing_disk
from lather.parallel.fsdp_units import FsdpUnit
from lather.parallel.side_streams import SideStream
from lather.pipeline.recorder import Recorder
from lather.pipeline.replay import Event
from lather.pipeline.schedule import WHOLE_STAGE, Action, Kind

FILE = "timeline.jsonl"
"""Name of the file in a run directory."""

SHORTEST_WAIT = 2e-5
"""Seconds; an action that waits for less is one event."""

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
        events: list[Event] = []
        last: dict[bool, int] = {}
        for action, start, end in spans:
            event = Event(self.rank, action, self._seconds(start), self._seconds(end))
            lane = action.kind in WHOLE_STAGE
            before = events[last[lane]] if lane in last else None
            if before and before.action == action and event.start - before.end < SHORTEST_WAIT:
                events[last[lane]] = replace(before, end=max(before.end, event.end))
            else:
                last[lane] = len(events)
                events.append(event)
        return events

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Record an action around the block."""
        nvtx = gpu_module(self.device).nvtx.range(str(action)) if is_gpu(self.device) else None
        with nvtx or nullcontext():
            if self._spans is None or action.kind in WHOLE_STAGE:  # its units have events
                yield
                return
            self._current = (action, self._now())
            yield
            self._close_span()

    @contextmanager
    def sharding(self, action: Action, unit: FsdpUnit) -> Iterator[None]:
        """Record a gather of a unit, or a sum of its gradients, around its start; nothing if the
        unit is gathered already, or has nothing to gather."""
        if self._spans is None or not _starts(action.kind, unit):
            yield
            return
        start, streams = self._now(), unit.sharded[0].streams
        yield
        side = streams.gathers if action.kind is Kind.UNSHARD else streams.reductions.stream
        self._spans.append((action, start, self._now(side)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude a wait for other ranks, inside an action."""
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

    def _now(self, side: SideStream | None = None) -> Moment:
        """Return the moment on the compute stream, or on a side stream."""
        if not is_gpu(self.device):
            return time.perf_counter()
        event = gpu_module(self.device).Event(enable_timing=True)
        if side is not None:
            side.record_in(event)
        else:
            event.record(gpu_module(self.device).current_stream(self.device))
        return event

    def _seconds(self, moment: Moment) -> float:
        return (
            moment - self._origin
            if isinstance(moment, float)
            else self._origin.elapsed_time(moment) / 1000
        )


def _starts(kind: Kind, unit: FsdpUnit) -> bool:
    """Return whether an action on a unit will start a gather or a sum."""
    if kind is Kind.UNSHARD:
        return not unit.is_gathered and bool(unit.gathered)
    return kind is Kind.REDUCE_GRAD and bool(unit.sharded)


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
    with names_failing_disk(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
