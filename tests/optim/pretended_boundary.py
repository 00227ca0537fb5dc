"""A pretended boundary between host and device on a CPU, for tests of `offload`: copies really
happen, and an order of reads and writes that only luck would bring about on a GPU is an error.

Operations run at once, in the order in which they are called. But each belongs to a stream of the
device or to the host, and has a clock: for each stream, and for the host, how many of its
operations are certainly done before. `wait_stream`, `wait_event` and the host's `synchronize` join
clocks; what the host calls comes after what the host has done. Operations on the same bytes, of
which one writes, must be in the order of their clocks.

Memory on the device that no chunk uses, and new memory of the host, is filled with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lather.optim.batched import buckets, pinned, streams, visits
from lather.storages import tensors_in

Clock = dict[int, int]
"""Stream, or the host -> number of its operations."""

HOST, STEP = 0, 1
"""Numbers of the host, and of the stream of the step."""

NAN_BYTE = 0xFF
"""Byte of which a NaN consists, in every dtype."""


class UnorderedError(AssertionError):
    """Two operations on the same bytes, of which one writes, in no certain order; or an operation
    on memory of both sides that is no copy."""


@dataclass(frozen=True)
class Access:
    """An operation on some bytes of a storage."""

    by: int
    number: int
    what: str
    begin: int
    end: int
    writes: bool


@dataclass
class Boundary:
    """Clocks of the host and of the streams, and their last accesses to the memory of both sides
    between which rows travel."""

    clocks: dict[int, Clock] = field(default_factory=lambda: {HOST: {}, STEP: {}})
    stream: int = STEP
    """The current stream."""
    fetched: int = 0
    """Bytes that have been copied to the device."""
    written: int = 0
    """Bytes that have been copied to the host."""
    sides: dict[int, str] = field(default_factory=dict)
    """Address of a storage -> "host" or "device"."""
    accesses: dict[int, list[Access]] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def add(self, memory: Tensor, side: str) -> Tensor:
        """Add memory of a side, filled with NaN."""
        memory.fill_(NAN_BYTE)
        self._alive.append(memory.untyped_storage())  # so that nobody else gets its address
        self.sides[memory.data_ptr()] = side
        return memory

    def is_host(self, x: Tensor) -> bool:
        """Whether a tensor is in memory of the host that belongs to the boundary."""
        return self.sides.get(x.untyped_storage().data_ptr()) == "host"

    def join(self, waiting: int, clock: Clock) -> None:
        own = self.clocks[waiting]
        for other, number in clock.items():
            own[other] = max(own.get(other, 0), number)

    def ran(self, what: str, reads: list[Tensor], writes: list[Tensor], *, waits_not: bool) -> None:
        """Check and record an operation."""
        touched = [(x, is_write) for xs, is_write in ((reads, False), (writes, True)) for x in xs]
        known = [
            (x, is_write, self.sides[x.untyped_storage().data_ptr()])
            for x, is_write in touched
            if x.numel() and x.untyped_storage().data_ptr() in self.sides
        ]
        sides = {side for *_, side in known}
        if not sides:
            return
        by = self.stream if "device" in sides else HOST
        if len(sides) == 2:
            if "copy_" not in what or not waits_not:
                raise UnorderedError(f"{what} uses memory of host and device")
            (target,) = writes
            if self.is_host(target):
                self.written += target.nbytes
            else:
                self.fetched += target.nbytes
        self.join(by, self.clocks[HOST])
        clock = self.clocks[by]
        clock[by] = clock.get(by, 0) + 1
        for x, is_write, _ in known:
            self._touch(x, Access(by, clock[by], what, *bounds(x), is_write), clock)

    def _touch(self, x: Tensor, new: Access, clock: Clock) -> None:
        key, rest = x.untyped_storage().data_ptr(), []
        for old in self.accesses.get(key, []):
            overlaps = old.begin < new.end and new.begin < old.end
            if overlaps and (old.writes or new.writes) and clock.get(old.by, 0) < old.number:
                raise UnorderedError(
                    f"{new.what} by {new.by} is in no certain order with {old.what} by {old.by}"
                )
            is_covered = new.writes or (old.by == new.by and not old.writes)
            if not (is_covered and new.begin <= old.begin and old.end <= new.end):
                rest.append(old)
        self.accesses[key] = [*rest, new]


def bounds(x: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after the last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    begin = x.storage_offset() * x.itemsize
    return int(begin), int(begin + (last + 1) * x.itemsize)


@dataclass(eq=False)
class Event:
    boundary: Boundary
    clock: Clock


@dataclass(eq=False)
class Stream:
    boundary: Boundary
    number: int

    def wait_stream(self, other: Stream) -> None:
        self.boundary.join(self.number, self.boundary.clocks[other.number])

    def wait_event(self, event: Event) -> None:
        self.boundary.join(self.number, event.clock)

    def record_event(self) -> Event:
        return Event(self.boundary, dict(self.boundary.clocks[self.number]))

    def synchronize(self) -> None:
        self.boundary.join(HOST, self.boundary.clocks[self.number])


@dataclass(eq=False)
class Module:
    """The part of `torch.cuda` that the visits use."""

    boundary: Boundary

    def __post_init__(self) -> None:
        self.Stream = self._new_stream

    def _new_stream(self, device: torch.device) -> Stream:
        number = len(self.boundary.clocks)
        self.boundary.clocks[number] = {}
        return Stream(self.boundary, number)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self.boundary, self.boundary.stream)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.boundary.stream = self.boundary.stream, stream.number
        try:
            yield
        finally:
            self.boundary.stream = before


class Watch(TorchDispatchMode):
    """Tells the boundary of the operations of the block, in one thread."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.boundary = boundary

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func.is_view:
            return out
        arguments = func._schema.arguments
        given = {x.name: value for x, value in zip(arguments, args, strict=False)} | kwargs
        changed = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write}
        self.boundary.ran(
            str(func),
            [x for name in given.keys() - changed for x in tensors_in(given[name])],
            [x for name in given.keys() & changed for x in tensors_in(given[name])],
            waits_not=bool(given.get("non_blocking")),
        )
        return out


@contextmanager
def crossing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Boundary]:
    """Have offloaded state on the other side of the boundary inside the block."""
    boundary = Boundary()
    start, write_back, end = (
        getattr(visits.Visits, name) for name in ("__init__", "_write_back", "end")
    )

    def started(self: visits.Visits, *arguments: Any) -> None:
        start(self, *arguments)
        for room in self._rooms:
            boundary.add(room.memory, "device")

    def written_back(self: visits.Visits, visit: Any, **options: bool) -> None:
        write_back(self, visit, **options)
        with self._gpu.stream(self._writing):
            visit.room.memory.fill_(NAN_BYTE)
            visit.room.is_free = self._writing.record_event()

    def ended(self: visits.Visits) -> None:
        rooms = list(self._rooms)
        end(self)
        for room in rooms:  # the next to whom torch gives this memory works on the step's stream
            room.memory.fill_(NAN_BYTE)

    with monkeypatch.context() as patch:
        patch.setattr(pinned, "is_gpu", lambda device: True)
        patch.setattr(
            pinned,
            "pinned",
            lambda size: boundary.add(torch.empty(size, dtype=torch.uint8), "host"),
        )
        patch.setattr(buckets, "is_pinned", boundary.is_host)
        for module in (visits, streams):
            patch.setattr(module, "gpu_module", lambda device: Module(boundary))
        patch.setattr(visits.Visits, "__init__", started)
        patch.setattr(visits.Visits, "_write_back", written_back)
        patch.setattr(visits.Visits, "end", ended)
        with Watch(boundary):
            yield boundary
