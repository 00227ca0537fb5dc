"""Buckets: parameters whose matrices are alike share one stack of state, and a step works on slices of it.

A bucket holds the state of several parameters as tensors with a leading batch dim over all their matrices, in the order of the
parameter groups; `optimizer.state[p]` holds views of its slice. In a step the members of a bucket that have a gradient, the same step
count and the same options form runs of neighbours, and a run is worked through in chunks small enough to bound temporary memory and, on
a CPU, to stay in the cache.

    Bucket   the stacks, and which rows belong to which parameter
    Run      neighbouring members that take this step alike
    Chunk    some rows of a run: gradients in, state as a batch, update out
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lather.optim.kronecker import SYMMETRIC_BLOCKS
from lather.optim.layout import Layout
from lather.optim.members import Member
from lather.optim.state import MatrixState, compute_dtype, kept_shape, matrix_state, state_entries, write_back
from lather.torch_private import foreach_add_, foreach_copy_, foreach_mul_

TEMPORARIES = 8
"""Matrices of temporary memory, per matrix, that an update holds at once: gradient, its projection, the update, and intermediates."""

CPU_CACHE_BYTES = 2**21
"""On a CPU a chunk's gradients take at most this, so that the passes of an update find them in the cache (measured: 1 to 4 MiB)."""


def cpu_count(count: int) -> int:
    """At least `count` matrices, in a multiple of the threads: with three matrices the second of two threads waits for a while."""
    threads = torch.get_num_threads()
    return -(-max(1, count) // threads) * threads


class Bucket:
    """Members with equal matrices, dtype, device and kinds of state, and their state stacked: name -> (rows, ...)."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.made_for = [member.made_for() for member in members]
        self.first_row = [0, *accumulate(member.layout.batch for member in members)]
        self.inner, self.factor_dims = members[0].layout.inner, members[0].layout.factor_dims
        self.device, self.dtype = members[0].device, members[0].dtype
        entries = state_entries(members[0].layout, members[0].group)
        self.stacks = {name: entry.allocate(self.first_row[-1], self.device) for name, entry in entries.items()}
        self.views = [
            {name: stack[start:stop].view(kept_shape(name, entries[name], member.layout)) for (name, stack) in self.stacks.items()}
            for (start, stop), member in zip(pairwise(self.first_row), self.members, strict=True)
        ]


def make_buckets(members: Iterable[Member], *, apart: Mapping[int, Any] | None = None) -> list[Bucket]:
    """The fewest buckets for these members; those with different values in `apart` (by id of the parameter) stay apart."""
    alike: dict[Any, list[Member]] = {}
    for member in members:
        layout = member.layout
        entries = tuple(state_entries(layout, member.group).items())
        key = (layout.kind, layout.inner, entries, member.dtype, member.device, (apart or {}).get(id(member.param)))
        alike.setdefault(key, []).append(member)
    return [Bucket(same) for same in alike.values()]


@dataclass
class Run:
    """Members first to last (exclusive) of a bucket, which take this step with the same t and the same options."""

    bucket: Bucket
    first: int
    last: int
    step: int
    options: Mapping[str, Any]
    lr: float
    interval: int
    """Steps between refreshes, at this step."""
    idle: list[bool] = field(default_factory=list)
    """Per row, whether it is an expert that got no token; empty where nothing is an expert."""
    exchange: int | None = None
    """Number of the exchange that its members take part in."""

    @property
    def rows(self) -> range:
        return range(self.bucket.first_row[self.first], self.bucket.first_row[self.last])

    def chunks(self) -> Iterator[Chunk]:
        """The run in pieces of at most `bucket_bytes` of temporaries (but at least one matrix)."""
        dtype, numel = compute_dtype(self.options), math.prod(self.bucket.inner)
        copied = sum(stack[0].numel() for stack in self.bucket.stacks.values() if self.idle or stack.dtype != dtype)
        block_row = max((self.bucket.inner[dim] ** 2 // SYMMETRIC_BLOCKS for dim in self.bucket.factor_dims), default=0)
        per_matrix = dtype.itemsize * (TEMPORARIES * numel + copied + block_row)
        count = self.options["bucket_bytes"] // self.options["num_streams"] // per_matrix
        if self.bucket.device.type == "cpu":
            count = min(count, cpu_count(CPU_CACHE_BYTES // (dtype.itemsize * numel)))
        count = max(1, count)
        if not self.options["batched"] and self.bucket.factor_dims:
            count = 1
        for start in range(self.rows.start, self.rows.stop, count):
            yield Chunk(self, start, min(start + count, self.rows.stop))


@dataclass(frozen=True)
class GroupNow:
    """What a parameter group asks for in this step."""

    number: int
    """Equal for groups with equal options."""
    lr: float


@dataclass(frozen=True)
class Taking:
    """A parameter that takes this step."""

    step: int
    """t."""
    interval: int
    """Steps between refreshes."""
    exchange: int | None = None
    """Number of the exchange that brings its gradient or takes its update away; None: it is worked on where it is."""


def runs_of(bucket: Bucket, taking: Mapping[int, Taking], idle: Mapping[int, list[bool]], groups: Mapping[int, GroupNow]) -> list[Run]:
    """The runs of a step.

    Args:
        taking: by the id of a parameter; those that are not there take no step.
        idle: id of a parameter -> which of its experts got no token.
        groups: by the id of a group.
    """
    runs: list[Run] = []
    last_key = None
    for i, member in enumerate(bucket.members):
        now = taking.get(id(member.param))
        key = None if now is None else (now.step, now.exchange, groups[id(member.group)].number)
        if key is not None and key == last_key:
            runs[-1].last = i + 1
        elif now is not None:
            lr = groups[id(member.group)].lr
            runs.append(Run(bucket, i, i + 1, now.step, member.group, lr, now.interval, exchange=now.exchange))
        last_key = key
    for run in runs:
        marks = []
        for member in bucket.members[run.first : run.last]:
            of_parameter = idle.get(id(member.param))
            marks += [of_parameter[number] for number in member.numbers] if of_parameter else []
        run.idle = marks if any(marks) else []
    return runs


@dataclass
class Chunk:
    """Rows start to stop of a bucket, all within one run."""

    run: Run
    start: int
    stop: int
    _pieces: list[tuple[int, int, int]] = field(init=False)
    """(member, from, to): the members that the chunk touches, with the range of their own tensors."""

    def __post_init__(self) -> None:
        first_row = self.run.bucket.first_row
        self._pieces = []
        i = bisect_right(first_row, self.start) - 1
        while first_row[i] < self.stop:
            start, stop = max(self.start, first_row[i]), min(self.stop, first_row[i + 1])
            self._pieces.append((i, start - first_row[i], stop - first_row[i]))
            i += 1

    def _gather(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Parameter-shaped tensors, by member, as one contiguous batch (B, ...) in the dtype of computation; a view if one suffices."""
        dtype = compute_dtype(self.run.options)
        batches = [self._member(i).layout.as_batch(tensors[i], start, stop) for i, start, stop in self._pieces]
        if len(batches) == 1:
            return batches[0].to(dtype).contiguous()
        out = batches[0].new_empty((self.stop - self.start, *self.run.bucket.inner), dtype=dtype)
        foreach_copy_(list(out.split([len(batch) for batch in batches])), batches)
        return out

    def _member(self, i: int) -> Member:
        return self.run.bucket.members[i]

    def gradients(self) -> Tensor:
        """(B, n_0, n_1, ...), with the sign of descent; never to be changed in place."""
        g = self._gather({i: self._member(i).grad() for i, _, _ in self._pieces})
        return -g if self.run.options["maximize"] else g

    def weights(self) -> Tensor:
        """The parameters as a batch, for reading."""
        return self._gather({i: self._member(i).weight() for i, _, _ in self._pieces})

    def state(self) -> MatrixState:
        """The state of these rows; `store` it after changing it."""
        active = None
        if self.run.idle:
            offset = self.run.rows.start
            marks = self.run.idle[self.start - offset : self.stop - offset]
            rows = [row for row, mark in enumerate(marks) if not mark]
            active = index_on(rows, self.run.bucket.device)
        return matrix_state(self._stacks(), self.run.step, compute_dtype(self.run.options), active)

    def store(self, state: MatrixState) -> None:
        write_back(state, self._stacks())

    def _stacks(self) -> dict[str, Tensor]:
        return {name: stack[self.start : self.stop] for name, stack in self.run.bucket.stacks.items()}

    def apply(self, u: Tensor, decay: float) -> None:
        """W = (1 - decay) W - lr U for what is here; updates that are to travel are put where they are sent from."""
        changed: list[tuple[Tensor, Tensor]] = []
        sent: list[tuple[Tensor, Tensor]] = []
        for (i, start, stop), piece in zip(self._pieces, u.split([b - a for _, a, b in self._pieces]), strict=True):
            member = self._member(i)
            part = member.layout.part(member.target(), start, stop)
            (changed if member.update is None else sent).append((part, member.layout.as_parameter(piece)))
        apply_(changed, self.run.lr, decay)
        if sent:
            foreach_copy_([part for part, _ in sent], [update for _, update in sent])


def index_on(rows: Sequence[int], device: torch.device) -> Tensor:
    """The rows as an index on a device, which is not waited for."""
    index = torch.tensor(rows, dtype=torch.long)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def apply_(changes: Sequence[tuple[Tensor, Tensor]], lr: float, decay: float) -> None:
    """W = (1 - decay) W - lr U for pairs (W, U) of equal dtypes, in place, rounded once to W's dtype."""
    if not changes:
        return
    parts, updates = ([change[side] for change in changes] for side in (0, 1))
    dtype = torch.promote_types(parts[0].dtype, updates[0].dtype)
    wide = parts if dtype == parts[0].dtype else [part.to(dtype) for part in parts]
    if decay:
        foreach_mul_(wide, 1 - decay)
    foreach_add_(wide, updates, alpha=-lr)
    if wide is not parts:
        foreach_copy_(parts, wide)


def check_state(state: Mapping[str, Any], layout: Layout, group: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless `state` has the entries and shapes that a parameter of this layout has under the options in `group`."""
    expected: dict[str, tuple[int, ...]] = {"step": ()}
    expected |= {key: kept_shape(key, entry, layout) for key, entry in state_entries(layout, group).items()}
    found = {key: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for key, x in state.items()}
    if found.get("step") in ("int", "float"):  # as torch's optimizers take it
        found["step"] = ()
    if found != expected:
        key = next(key for key in (*expected, *found) if expected.get(key) != found.get(key))
        raise ValueError(
            f"{what} has {key} {found.get(key, 'missing')}, expected {expected.get(key, 'none')}: "
            "it belongs to another parameter or to other options; give the parameters in the same order and options as when it was made"
        )
