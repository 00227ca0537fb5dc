"""Divides the time of profiled steps, by phase of the step and by kind of operation.

The input is a Chrome trace that torch's profiler has written. Its events of the form "X" have a
start `ts` and a duration `dur` in microseconds; those whose name begins with "lather." are ranges
of `lather.profiled`.

On a CPU each moment of the thread that trains belongs to the innermost range and the innermost
operation; moments without an operation are the host's: Python, autograd, and waits.

On a GPU each moment belongs to what runs on the device: a computation, or else communication that
no computation hides, or else a copy; moments when nothing runs are idle. An operation has the phase
in which the host launched it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lather.files import read_text
from lather.profiled import PREFIX

Interval = tuple[float, float]

STEP = "step"
"""Name of the range of a step, before its number."""
OTHER, IDLE, HOST = "other", "idle", "host"
COMMUNICATION, COPIES = "communication", "copies"
PHASES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "weight_gradients": "weight gradients",
    "exchange": "exchange of tokens",
    "context": "exchange of sequences",
    "gather": "gathers",
    "reduce": "sums of gradients",
    "wait": "waits for ranks",
    "read": "results read",
    "optimizer": "optimizer",
    "optim": "optimizer",
    "refresh": "refreshes",
    STEP: OTHER,
}
"""Phases by the first part of a range's name. Other ranges, of actions and segments, are no phase
of their own."""
WAITS = re.compile(rf"^{re.escape(PREFIX)}(wait|exchange|context|optim\.exchange)")
"""Matches ranges whose own time is spent on communication."""
KINDS = {
    COMMUNICATION: r"nccl|gloo|c10d::",
    "attention": r"scaled_dot_product|flash|fmha|sdpa|flex|attention|delta_rule",
    "matrix products": (
        r"gemm|cutlass|nvjet|wgmma|cublas|xmma|::_?(grouped_|scaled_)?(add|b|badd)?(mm|bmm|mv)\b"
        r"|matmul|linear|grouped_mm|_product"
    ),
    "decompositions": (
        r"linalg_(?!norm|vector_norm|matrix_norm)|cholesky|potrf|geqrf|householder|trsm|syev"
        r"|triangular|::(geqrf|orgqr|ormqr)"
    ),
    "indexing, sorting": (
        r"gather|scatter|index|embedding|sort|topk|combine|route|::(where|masked|nonzero|unique)"
    ),
    COPIES: r"memcpy|memset|copy|::(to|clone|contiguous|cat|stack|fill_|zero_|empty\w*|zeros)\b",
    HOST: (
        r"^autograd::|Backward\d*$|^Optimizer\.|^ProfilerStep"
        r"|::_?(t|transpose|view\w*|reshape\w*|unsafe_view|expand|slice|select|narrow|split\w*|unbind"
        r"|detach\w*|as_strided|squeeze|unsqueeze|permute|alias|chunk|item|local_scalar_dense)$"
    ),
}
"""Kinds of operations by patterns of names, of which the first that matches counts. All other
operations are `ELEMENTWISE`."""
ELEMENTWISE = "elementwise, norms, sums"
PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the events of a device."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the host's calls that launch them."""
ON_HOST = ("cpu_op", "user_annotation")
READ = {*ON_DEVICE, *LAUNCHES, *ON_HOST}


class TraceEvent(NamedTuple):
    """An event of a trace; times in microseconds."""

    name: str
    category: str
    thread: int
    start: float
    end: float
    correlation: int | None = None
    """Number that a call of the host and what it launches on a device have in common."""


@dataclass(frozen=True)
class StepTimes:
    """The time of a rank, averaged over its profiled steps."""

    seconds: float
    """Seconds of a step."""
    by_phase: dict[str, float]
    """Seconds by phase of the step; their sum is `seconds`."""
    by_kind: dict[str, float]
    """The same by kind of operation."""


@dataclass(frozen=True)
class Part:
    """A piece of time, from `start` to `end` in microseconds."""

    start: float
    end: float
    phase: str
    kind: str


def read_events(path: Path) -> Iterator[TraceEvent]:
    """Read the events with a duration from a Chrome trace, one after the other: all at once would
    take many times the memory of the file."""
    text, decode = read_text(path), json.JSONDecoder().raw_decode
    place = text.index("[", text.index('"traceEvents"')) + 1
    while (place := text.find("{", place)) >= 0:
        event, place = decode(text, place)
        if event.get("ph") == "X" and event.get("cat") in READ:
            start, correlation = float(event["ts"]), event.get("args", {}).get("correlation")
            end = start + float(event["dur"])
            yield TraceEvent(event["name"], event["cat"], event["tid"], start, end, correlation)
        if text[place : place + 80].lstrip()[:1] != ",":  # the last one
            return


def step_times(events: Iterable[TraceEvent]) -> StepTimes:
    """Divide the time of the steps in a trace. Raises ValueError if it has no step."""
    events = list(events)
    steps = [event for event in events if _range_of(event) == STEP]
    if not steps:
        raise ValueError("the trace has no range of a step")
    windows = sorted((event.start, event.end) for event in steps)
    on_thread = [
        each for each in events if each.thread == steps[0].thread and each.category in ON_HOST
    ]
    on_device = [event for event in events if event.category in ON_DEVICE]
    parts = list(_host_parts(on_thread))
    if on_device:
        parts = list(_device_parts(on_device, events, parts))
    by_phase: defaultdict[str, float] = defaultdict(float)
    by_kind: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        inside = sum(
            max(0.0, min(part.end, end) - max(part.start, start)) for start, end in windows
        )
        by_phase[part.phase] += inside
        by_kind[part.kind] += inside
    total = sum(end - start for start, end in windows)
    rest = total - sum(by_phase.values())
    by_phase[IDLE if on_device else OTHER] += rest
    by_kind[IDLE if on_device else HOST] += rest
    scale = 1e6 * len(windows)
    return StepTimes(total / scale, _scaled(by_phase, scale), _scaled(by_kind, scale))


def _scaled(microseconds: Mapping[str, float], scale: float) -> dict[str, float]:
    return {name: time / scale for name, time in microseconds.items() if time > 0}


@lru_cache
def kind_of(name: str) -> str:
    """Return the kind of an operation, a kernel or a range."""
    if name.startswith(PREFIX):
        return COMMUNICATION if WAITS.match(name) else HOST
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), ELEMENTWISE)


def _range_of(event: TraceEvent) -> str:
    """Return the first part of the name of a range of ours; empty for any other event."""
    is_ours = event.category == "user_annotation" and event.name.startswith(PREFIX)
    return event.name.removeprefix(PREFIX).split(".")[0] if is_ours else ""


def _phase_of(event: TraceEvent, outer: str) -> str:
    if event.name.startswith(f"{PREFIX}optim.") and event.name.endswith("refresh"):
        return PHASES["refresh"]
    return PHASES.get(_range_of(event), outer)


def _host_parts(events: Sequence[TraceEvent]) -> Iterator[Part]:
    """Yield the time of a thread, in order: each piece with the innermost phase and kind."""
    stack: list[tuple[float, str, str]] = []
    now = 0.0
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        yield from _left(stack, now, event.start)
        now = max(now, event.start)
        _, phase, kind = stack[-1] if stack else (0.0, OTHER, HOST)
        own = kind_of(event.name)
        inherits = own == HOST and event.category == "user_annotation"
        end = min(event.end, stack[-1][0]) if stack else event.end
        stack.append((end, _phase_of(event, phase), kind if inherits else own))
    yield from _left(stack, now, float("inf"))


def _left(stack: list[tuple[float, str, str]], now: float, until: float) -> Iterator[Part]:
    """Yield the time of the open events from `now` on, and drop those that end before `until`."""
    while stack and stack[-1][0] <= until:
        end, phase, kind = stack.pop()
        if end > now:
            yield Part(now, end, phase, kind)
            now = end
    if stack and until > now:
        yield Part(now, until, *stack[-1][1:])


def _device_parts(
    on_device: Sequence[TraceEvent], events: Sequence[TraceEvent], host: Sequence[Part]
) -> Iterator[Part]:
    """Yield the time in which a device worked: computations first, then communication beside which
    nothing was computed, then copies beside which nothing else ran."""
    launched = {each.correlation: each.start for each in events if each.category in LAUNCHES}
    starts = [part.start for part in host]

    def phase_of(event: TraceEvent) -> str:
        moment = launched.get(event.correlation, float("-inf"))
        index = bisect_right(starts, moment) - 1
        return OTHER if index < 0 else host[index].phase

    kinds = [(event, kind_of(event.name)) for event in sorted(on_device, key=lambda e: e.start)]
    covered: list[Interval] = []
    for rank in range(3):
        new: list[Interval] = []
        until = float("-inf")
        for event, kind in kinds:
            if _rank_of(kind) != rank:
                continue
            for start, end in _uncovered(max(event.start, until), event.end, covered):
                new.append((start, end))
                yield Part(start, end, phase_of(event), kind)
            until = max(until, event.end)
        covered = sorted(covered + new)


def _rank_of(kind: str) -> int:
    """Return the rank of a kind among those that run at once; the lowest counts."""
    return {COMMUNICATION: 1, COPIES: 2}.get(kind, 0)


def _uncovered(start: float, end: float, covered: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the pieces of an interval outside of sorted intervals that do not overlap."""
    index = max(0, bisect_right(covered, (start, float("inf"))) - 1)
    while start < end:
        if index == len(covered) or covered[index][0] >= end:
            yield start, end
            return
        left, right = covered[index]
        if left > start:
            yield start, left
        start = max(start, right)
        index += 1
