"""Counts the bytes that a pipeline rank keeps between forward and backward, in three ways.

*Saved bytes* are counted at the moments between two actions of the schedule: the storages that the
step has made and that are alive, besides parameters, gradients of parameters and the batch. Nothing
runs at such a moment, so there are no temporaries: what is alive was saved by autograd, waits for
its W action, travels or waits for its reader, or is held by somebody else. The peak is the most of
these in a rank's step.

    counted    every operation's outputs, by storage, as `PeakBytes` counts them
    tracker    torch's `MemTracker`, categories Activation and Temp
    tape       storages that are kept for a known reason: those that autograd holds
               (`saved_tensors_hooks`) or that can be reached from the executor's state (tapes,
               weight gradients that wait, boundary tensors), each once. For our executor alone.

*With temporaries* is the tracker's peak at any time, also within an action.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.live_bytes import PeakBytes
from benchmarks.pipeline_ranks import Contestant, OurRuntime
from lather.torch_private import memory_tracker


@dataclass
class Counts:
    """The byte counts of one rank's step."""

    saved: int = 0
    """Saved bytes at the peak."""
    tracker: int | None = None
    tape: int | None = None
    with_temporaries: int | None = None
    """The tracker's peak at any time; None where the tracker did not run."""
    after: int = 0
    """Bytes that are still alive when the step is over."""
    worst_difference: float = 0.0
    """The largest difference of tracker or tape from the count at any moment, relative to the
    peak."""
    origins: dict[str, int] = field(default_factory=dict)
    """Saved bytes at the peak by what holds them; for our executor alone."""


class _Packed:
    """A tensor that autograd holds; this object lives as long as autograd holds it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _unpack(packed: _Packed) -> Tensor:
    return packed.tensor


def counted_step(
    contestant: Contestant, tokens_BS: Tensor, labels_BS: Tensor, *, tracked: bool = True
) -> tuple[float, Counts]:
    """Take the first step of a contestant whose parameters have gradients; returns its loss and
    what it kept.

    If `tracked`, torch's tracker counts, too, which takes twice the time of all the rest.
    """
    counts = Counts()
    outside = {*map(_key, _outside(contestant, tokens_BS, labels_BS))}
    packed: WeakSet[_Packed] = WeakSet()
    differences = [0]
    tracker = memory_tracker()
    tracker.track_external(contestant.part, tokens_BS, labels_BS)

    def pack(tensor: Tensor) -> _Packed:
        one = _Packed(tensor)
        packed.add(one)
        return one

    def look() -> None:
        now = alive.now
        if isinstance(contestant, OurRuntime):
            origins = tape_bytes(contestant, packed, outside)
            by_tape = sum(origins.values())
            if now > counts.saved:
                counts.origins = origins
            counts.tape = max(counts.tape or 0, by_tape)
            differences.append(abs(by_tape - now))
        if tracked:
            by_tracker = _tracked(tracker)
            counts.tracker = max(counts.tracker or 0, by_tracker)
            differences.append(abs(by_tracker - now))
        counts.saved = max(counts.saved, now)

    with (
        tracker if tracked else nullcontext(),
        PeakBytes() as alive,
        saved_tensors_hooks(pack, _unpack),
    ):
        loss = contestant.step(tokens_BS, labels_BS, look)
        counts.after = alive.now
    if tracked:
        counts.with_temporaries = _tracked(tracker, "peak")
    counts.worst_difference = max(differences) / max(1, counts.saved)
    return loss, counts


def _outside(contestant: Contestant, *batch: Tensor) -> Iterator[Tensor]:
    yield from batch
    for p in contestant.part.parameters():
        yield p
        assert p.grad is not None
        yield p.grad


def _key(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tracked(tracker: Any, when: str = "current") -> int:
    snapshot = tracker.get_tracker_snapshot(when).get(torch.device("cpu"), {})
    return int(sum(snapshot.get(kind, 0) for kind in ("Activation", "Temp")))


def tape_bytes(
    contestant: OurRuntime, packed: Iterable[_Packed], outside: set[int]
) -> dict[str, int]:
    """Return the bytes of the distinct storages that autograd or the executor holds, by origin."""
    walk = contestant.executor.walk
    assert walk is not None
    held: list[tuple[str, Tensor]] = []
    held += [
        ("boundary tensors", x)
        for x in tensors_within((walk.incoming, walk.outgoing, [s[:2] for s in walk.sends]))
    ]
    held += [("weight gradients that wait", x) for x in tensors_within(walk.waiting)]
    held += [("routings of the step", x) for x in tensors_within(walk.output)]
    held += [("held on purpose", x) for tape in walk.tapes.values() for x in tape.held]
    held += [("autograd", one.tensor) for one in packed]
    held += [("cuts and tapes", x) for x in tensors_within(walk.tapes)]
    sizes: defaultdict[str, int] = defaultdict(int)
    seen = set(outside)
    for origin, x in held:
        storage = x.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[origin] += storage.nbytes()
    return dict(sizes)


def tensors_within(root: object) -> Iterator[Tensor]:
    """Yield all tensors in nested containers, attributes, partial applications and closures, but
    not in modules."""
    seen: set[int] = set()
    stack: list[object] = [root]
    while stack:
        x = stack.pop()
        if (
            id(x) in seen
            or x is None
            or isinstance(x, nn.Module | str | bytes | int | float | type)
        ):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, Mapping):
            stack += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple | set | frozenset | deque):
            stack += x
        elif isinstance(x, partial):
            stack += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, FunctionType):
            stack += [cell.cell_contents for cell in x.__closure__ or ()]
        else:
            stack += vars(x).values() if hasattr(x, "__dict__") else []
