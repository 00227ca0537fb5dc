"""Visits to the device: the step of state that is kept in the host's memory (`offload`).

The rows of a chunk are fetched, take all phases of the step, and are written back. Phases of
different matrices do not depend on each other, so the results are those of a step phase by phase.
Every row travels once in each direction; bases are written back only if somebody has changed them,
which is usually a refresh. The bus carries both directions at once, so each has a stream beside
that of the step:

    fetching     chunk i+1 arrives          when chunk i-2, whose room it takes, is written back
    the step's   chunk i takes its step     when it has arrived
    writing      chunk i-1 is written back  when its step is done

A chunk whose step raises is not written back: its state is as before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from lather.device import gpu_module
from lather.optim.batched.elements import step_chunk_whole
from lather.optim.batched.pinned import padded
from lather.optim.batched.plan import Chunk, Chunks, matmul_precision
from lather.optim.batched.refresh import Counts, DimRefresh, due_refreshes, refresh
from lather.optim.batched.roster import Roster
from lather.optim.batched.runs import VISITORS, MemberRun
from lather.optim.batched.streams import SideStreams, after_the_caller
from lather.optim.rule import NOBODY, RefreshingRule

FETCHING, WRITING = -2, -3
"""Numbers of the side streams of the copies."""


@dataclass(eq=False)
class _Room:
    """Memory on the device for the rows of a chunk."""

    memory: Tensor
    is_free: Any = None
    """Event at the end of the copies from this room to the host; None before the first."""


@dataclass(eq=False)
class _Visit:
    """Rows of a chunk that are on their way to the device, or there."""

    chunk: Chunk
    room: _Room
    stacks: dict[str, Tensor]
    """The rows by name. Each tensor has a version counter of its own, which begins at 0."""
    has_arrived: Any
    """Event at the end of the copies to the device."""


class Visits:
    """The visits of one step to a device, with room for `VISITORS` chunks there."""

    def __init__(self, visitors: Sequence[Chunk], streams: SideStreams) -> None:
        """`visitors`: all chunks that visit the device in the step."""
        device = visitors[0].bucket.device
        self._gpu = gpu_module(device)
        self._compute = self._gpu.current_stream(device)
        size = max(map(_num_bytes, visitors))
        self._rooms = [
            _Room(torch.empty(size, dtype=torch.uint8, device=device)) for _ in visitors[:VISITORS]
        ]
        self._fetching = after_the_caller(streams, FETCHING, device)
        self._writing = after_the_caller(streams, WRITING, device)
        self._num_fetched = 0

    def step(
        self, runs: Sequence[MemberRun], chunks: Chunks, roster: Roster | None, counts: Counts
    ) -> None:
        """Take the step of runs whose state is offloaded. `roster`: that of the step."""
        due = {run: due_refreshes([run], roster, counts) for run in runs if run.due is not NOBODY}
        visitors = [chunk for run in runs for chunk in chunks[run]]
        arriving = list(map(self._fetch, visitors[:1]))
        for chunk, following in zip_longest(visitors, visitors[1:]):
            visit = arriving.pop()
            if following is not None:
                arriving.append(self._fetch(following))
            self._compute.wait_event(visit.has_arrived)
            jobs = _of_chunk(due.get(chunk.run, ()), chunk)
            bucket, home = chunk.bucket, chunk.bucket.stacks
            bucket.stacks, bucket.first_here = visit.stacks, chunk.start
            try:
                _take_all_phases(chunk, jobs, counts)
            finally:
                bucket.stacks, bucket.first_here = home, 0
            has_refreshes = isinstance(chunk.run.rule, RefreshingRule)
            may_skip = has_refreshes and not jobs and not torch.is_inference_mode_enabled()
            self._write_back(visit, with_bases=not may_skip)

    def end(self) -> None:
        """Make the step's stream wait for all copies, and free the rooms."""
        self._compute.wait_stream(self._fetching)
        self._compute.wait_stream(self._writing)
        self._rooms.clear()

    def _fetch(self, chunk: Chunk) -> _Visit:
        """Start to copy the rows of a chunk to the device."""
        room = self._rooms[self._num_fetched % len(self._rooms)]
        self._num_fetched += 1
        stacks, begin = dict[str, Tensor](), 0
        with self._gpu.stream(self._fetching):
            if room.is_free is not None:
                self._fetching.wait_event(room.is_free)
            for name, rows in chunk.rows_here().items():
                memory = room.memory[begin : begin + rows.nbytes]
                arriving = memory.view(rows.dtype).view(rows.shape)
                stacks[name] = arriving.copy_(rows, non_blocking=True).data
                begin += padded(rows.nbytes)
            return _Visit(chunk, room, stacks, self._fetching.record_event())

    def _write_back(self, visit: _Visit, *, with_bases: bool) -> None:
        """Start to copy to the host what the step has changed. Bases are among it if `with_bases`,
        or if torch counts a change of them."""
        done, entries = self._compute.record_event(), visit.chunk.bucket.entries
        with self._gpu.stream(self._writing):
            self._writing.wait_event(done)
            for name, rows in visit.chunk.rows_here().items():
                x = visit.stacks[name]
                if with_bases or not entries[name].is_basis or x._version:
                    rows.copy_(x, non_blocking=True)
            visit.room.is_free = self._writing.record_event()


def wait_for_host(streams: SideStreams) -> None:
    """Wait until all state that visits a device has been written back."""
    for (number, _), stream in streams.items():
        if number == WRITING:
            stream.synchronize()


def _num_bytes(chunk: Chunk) -> int:
    return sum(padded(rows.nbytes) for rows in chunk.rows_here().values())


def _of_chunk(jobs: Sequence[DimRefresh], chunk: Chunk) -> list[DimRefresh]:
    """Return the part of refreshes that concerns the rows of a chunk."""
    here = range(chunk.start, chunk.stop)
    parts = (replace(job, rows=[row for row in job.rows if row in here]) for job in jobs)
    return [job for job in parts if job.rows]


def _take_all_phases(chunk: Chunk, jobs: list[DimRefresh], counts: Counts) -> None:
    """Take the step of a chunk whose rows are on the device, with the refreshes that are due."""
    run = chunk.run
    with matmul_precision(run.precision):
        if run.info.has_statistics:
            with record_function("lather.optim.statistics"):
                chunk.take_statistics()
        if run.rule.refreshes_first:
            _refresh(jobs, counts)
        with record_function("lather.optim.update"):
            if not (chunk.bucket.layout.elementwise and step_chunk_whole(chunk)):
                chunk.take_update()
    if not run.rule.refreshes_first:
        _refresh(jobs, counts)


def _refresh(jobs: list[DimRefresh], counts: Counts) -> None:
    if jobs:
        with record_function("lather.optim.refresh"):
            refresh(jobs, counts)
