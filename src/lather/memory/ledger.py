"""Records which bytes are alive at which operation, and their purpose: the creation, changes of
size and deletion of every storage.

A `Ledger` is given the tensors of each operation (`note`), and counts operations as time. The
purpose of a storage is often known only later (a tensor that a forward pass creates and nothing
deletes is an activation), so `label` and `settle` may set its kind at any time while it lives, and
the kind applies from its creation on. Storages are distinguished by identity and count with their
current size, which `resize_` may change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from lather.storages import following_resizes

KINDS = (
    "parameters",
    "optimizer moments",
    "optimizer factors",
    "optimizer bases",
    "gradients",
    "gathered parameters",
    "rounded weights",
    "activations",
    "communication",
    "checkpoint copies",
    "temporaries",
)
"""Kinds of bytes; activations also have a segment."""
BETWEEN_SEGMENTS = "between segments"
"""Name of the segment of activations that are made outside of segments."""


def segment_title(segment: str, *, has_experts: bool) -> str:
    """Return the name of a segment for a reader: feed-forward layers, which share a segment with
    experts, go by their own name in a model without experts."""
    return "feed-forward" if segment == "experts" and not has_experts else segment


@dataclass
class StorageRecord:
    """The history of a storage."""

    size: int
    """Current bytes; 0 after it was deleted."""
    phase: str
    """Action of the schedule, or phase of the optimizer, that created it."""
    segment: str
    """Segment of a block's pass that created it; empty outside of segments."""
    kind: str = ""
    """One of KINDS; empty while not known."""
    travels: bool = False
    """Whether it was sent to or received from other ranks."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(time, change in bytes)."""

    def size_at(self, time: int) -> int:
        """Return the bytes at a time."""
        return sum(change for when, change in self.changes if when <= time)


@dataclass(frozen=True)
class Mark:
    """The start of an action or phase."""

    time: int
    name: str


class Ledger:
    """The record that the module docstring describes. A single ledger at a time can follow
    `resize_`."""

    def __init__(self) -> None:
        self.time = 0
        """Number of operations so far."""
        self.phase, self.segment = "", ""
        self.records: list[StorageRecord] = []
        self.marks: list[Mark] = []
        self._alive: dict[int, tuple[ref[torch.UntypedStorage], StorageRecord]] = {}

    def note(self, tensors: Iterable[Tensor], *, travels: bool = False) -> None:
        """Record an operation that created or used these tensors."""
        self.time += 1
        for x in tensors:
            storage = x.untyped_storage()
            key, size = id(storage), storage.nbytes()
            known = self._alive.get(key)
            if known is None:
                record = StorageRecord(size, self.phase, self.segment, changes=[(self.time, size)])
                self.records.append(record)
                self._alive[key] = (ref(storage, partial(self._gone, key)), record)
            else:
                record = known[1]
                self._resized(record, size, self.time)
            record.travels |= travels

    def mark(self, name: str) -> None:
        """Start an action or phase, to which storages belong that are created from now on."""
        self.phase = name
        self.marks.append(Mark(self.time, name))

    def record_of(self, x: Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage; None if it is not known."""
        entry = self._alive.get(id(x.untyped_storage()))
        return None if entry is None else entry[1]

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Set the kind of those of these tensors that are known and have none yet."""
        assert kind in KINDS
        for x in tensors:
            record = self.record_of(x)
            if record is not None and not record.kind:
                record.kind = kind

    def settle(self, kind: str, since: int | None = None) -> None:
        """Set the kind of all live storages that have none yet; with `since`, only of those that
        were created after the first so many."""
        assert kind in KINDS
        alive = (record for _, record in self._alive.values())
        for record in alive if since is None else self.records[since:]:
            if not record.kind and record.size:
                record.kind = kind

    def _gone(self, key: int, _: object) -> None:
        self._resized(self._alive.pop(key)[1], 0, self.time + 1)

    def _resized(self, record: StorageRecord, size: int, time: int) -> None:
        """Record a change of size. Bytes that are freed after an operation count during it, and not
        at the next."""
        if size != record.size:
            record.changes.append((time, size - record.size))
            record.size = size

    def following_sizes(self) -> AbstractContextManager[object]:
        """Record `resize_` of storages when it happens, inside the block."""

        def resized(storage: torch.UntypedStorage) -> None:
            if (known := self._alive.get(id(storage))) is not None:
                self._resized(known[1], storage.nbytes(), self.time + 1)

        return following_resizes(resized)

    def timeline(self, start: int = 0) -> MemoryTimeline:
        """Return the bytes of each kind from `start` until now."""
        length = self.time - start + 1
        curves = np.zeros((len(KINDS), length), np.int64)
        segments: dict[str, np.ndarray[Any, Any]] = {}
        for record in self.records:
            kind = record.kind or ("communication" if record.travels else "temporaries")
            rows = [curves[KINDS.index(kind)]]
            if kind == "activations":
                rows.append(
                    segments.setdefault(
                        record.segment or BETWEEN_SEGMENTS, np.zeros(length, np.int64)
                    )
                )
            for time, change in record.changes:
                if time <= self.time:  # not what was freed after the last operation
                    for row in rows:
                        row[max(0, time - start)] += change
        marks = [Mark(mark.time - start, mark.name) for mark in self.marks if mark.time >= start]
        return MemoryTimeline(
            np.cumsum(curves, axis=1),
            {name: np.cumsum(row) for name, row in segments.items()},
            marks,
        )


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes by kind and operation."""

    curves: np.ndarray[Any, Any]
    """(kinds, times), in bytes, with rows as in KINDS."""
    segments: dict[str, np.ndarray[Any, Any]]
    """(times,): bytes of activations, by the segment that created them."""
    marks: Sequence[Mark]

    @property
    def total(self) -> np.ndarray[Any, Any]:
        return self.curves.sum(axis=0)

    def of_kind(self, kind: str) -> np.ndarray[Any, Any]:
        """Return the bytes of this kind, (times,)."""
        return np.asarray(self.curves[KINDS.index(kind)])

    @property
    def peak_time(self) -> int:
        return int(self.total.argmax())

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return int(self.total.max())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak of each kind that is present."""
        return self.at(self.peak_time)

    def thinned(self, points: int) -> MemoryTimeline:
        """Return a copy with at most `points` times; each interval keeps its time with the most
        bytes, so that the peak stays."""
        length = self.curves.shape[1]
        if length <= points:
            return self
        edges = np.linspace(0, length, points + 1).astype(int)
        total = self.total
        times = np.array(
            [start + int(total[start:stop].argmax()) for start, stop in pairwise(edges)]
        )
        doing = [self.doing_at(int(time)) for time in times]
        marks = [
            Mark(time, name)
            for time, name in enumerate(doing)
            if time == 0 or name != doing[time - 1]
        ]
        return MemoryTimeline(
            self.curves[:, times], {name: row[times] for name, row in self.segments.items()}, marks
        )

    def at(self, time: int) -> dict[str, int]:
        """Return the bytes of each kind that is present."""
        return {
            kind: int(row[time]) for kind, row in zip(KINDS, self.curves, strict=True) if row[time]
        }

    def segments_at(self, time: int) -> dict[str, int]:
        """Return the bytes of activations by segment, largest first."""
        sizes = {name: int(row[time]) for name, row in self.segments.items() if row[time]}
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Return the name and time of each mark, and the time of the next."""
        starts = [mark.time for mark in self.marks]
        return zip(
            (mark.name for mark in self.marks),
            starts,
            [*starts[1:], self.curves.shape[1]],
            strict=True,
        )

    @property
    def when(self) -> str:
        """Name of the last mark up to the peak."""
        return self.doing_at(self.peak_time)

    def doing_at(self, time: int) -> str:
        """Return the name of the last mark up to this time."""
        i = bisect_right(self.marks, time, key=lambda mark: mark.time)
        return self.marks[i - 1].name if i else ""
