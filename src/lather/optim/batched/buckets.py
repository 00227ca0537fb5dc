"""Buckets: parameters whose matrices have equal shapes and state share stacked state tensors.

A stack is a state tensor with a leading batch dim over the matrices of several parameters, in the
order of the parameter groups; `optimizer.state[p]` holds views of the rows that belong to p. The
views alone keep a stack alive: between steps a bucket has no tensor, so that memory is free as soon
as the user removes or moves the state. A step opens the buckets: it finds the stacks in the state.

A member of a bucket is the part of a parameter on which this rank works. It has the same interface
in all three cases: gradient and weight as tensors of one shape, and the tensor that an update
changes.

    Member           a parameter that is not spread over ranks
    RegionMember     a region of this rank's part of a parameter, whose matrices this rank owns
                     (`lather.optim.sharded.exchange`)
    AssembledMember  matrices that this rank owns and other ranks hold parts of: parts of the
                     gradient arrive from them, and updates are sent back
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lather.boxes import local, local_grad
from lather.device import is_gpu
from lather.optim.batched.formats import StateEntry
from lather.optim.batched.matrix_layout import Layout
from lather.optim.batched.pinned import PinnedMemory, is_offloaded, is_pinned, padded
from lather.optim.batched.remainders import REMAINDER

T = TypeVar("T")

BUCKET_BYTES = 2**28
"""Limit on the temporary memory of a step on a CPU if `bucket_bytes` is not given."""

GPU_BYTES = 2**32
"""The same on a GPU: about 20 matrices of 2048 rows then form a batch of a refresh; with half of it
a refresh takes 1.6 times as many launches. It does not depend on the memory that is free, because
another division into batches gives other bits, and a run that is resumed should not."""

STATE_BYTES, GPU_STATE_BYTES = 2**26, 2**31
"""Largest state of a bucket of several members on a CPU, and on a GPU; a quarter of it under an
elementwise rule, whose kernel needs no stacks. The memory of a bucket is free when the state of its
last member has been moved away, so larger buckets would raise the peak of moving all state; smaller
buckets would divide the batches of a step."""

States = Mapping[Tensor, dict[str, Tensor]]
"""Parameter -> its state: `step`, and entries by name."""

HostMemory = Mapping[torch.dtype, PinnedMemory]
"""Memory of the host by the dtype of the stacks in it: torch saves no memory with several."""


@dataclass(eq=False)
class Member:
    """One parameter in a bucket."""

    param: Tensor
    """Parameter as it was given to the optimizer."""
    layout: Layout
    """Layout of the part on which this rank works."""
    numbers: Sequence[int]
    """Numbers of the member's matrices among those of the whole parameter."""

    is_sent: ClassVar[bool] = False
    """Whether the update is sent to other ranks, and does not change the parameter here."""

    @property
    def device(self) -> torch.device:
        return self.param.device

    def part(self, x: Tensor) -> Tensor:
        """Return the view for this member of a tensor with the shape of the parameter on this
        rank."""
        return x

    def grad(self) -> Tensor:
        """Return the gradient, which nobody may change."""
        return self.part(local_grad(self.param))

    def weight(self) -> Tensor:
        """Return the weight: a view of the parameter, or the gathered weight."""
        return self.part(local(self.param))

    def target(self) -> Tensor:
        """Return the tensor that an update changes: a view of the parameter, or the tensor that is
        sent."""
        return self.weight()


class Bucket:
    """Members whose matrices have equal shape, dtype, device and entries of state."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.first_row = [0, *accumulate(member.layout.batch for member in members)]
        layout = members[0].layout  # of the first member: all have its class, `inner` and `dims`
        self.layout, self.inner, self.dims = layout, layout.inner, layout.dims
        self.has_experts, self.device = layout.has_experts, members[0].device
        self.offloaded = is_offloaded(layout.rule, self.device)
        """Whether the stacks are in the host's memory, and their rows visit the device."""
        self.home = torch.device("cpu") if self.offloaded else self.device
        """Device of the stacks."""
        self.param_dtype = members[0].param.dtype
        self.formats, self.entries = layout.formats, layout.entries
        self.states: list[dict[str, Tensor]] = []
        """State of each member while the bucket is open; otherwise empty."""
        self.stacks: dict[str, Tensor] = {}
        """Stacked state, name -> (rows, ...), while the bucket is open; otherwise empty. During a
        visit: the rows that are on the device."""
        self.first_here = 0
        """Number of the row with which `stacks` begin."""
        self.sizes = {name: (self.first_row[-1], *x.shape) for name, x in self.entries.items()}
        """Shape of each stack."""
        self.strides = {
            name: tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
            for name, size in self.sizes.items()
        }
        """Strides of each stack, which is contiguous."""
        self.row_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.entries.values())
        """Bytes of the state of a row."""

    def allocate(self, host: HostMemory | None = None) -> list[dict[str, Tensor]]:
        """Allocate the stacks with their initial values, in `host` if they are offloaded, and
        return the views of each member. They are detached, because autograd keeps the base of any
        other view alive, even when the user replaces the view's `data`."""
        entries = self.entries.items()
        host = host or host_memory([self])
        stacks = {
            name: host[x.dtype].stack(self.sizes[name], x.dtype)
            if self.offloaded
            else torch.empty(self.sizes[name], dtype=x.dtype, device=self.device)
            for name, x in entries
        }
        for form in self.formats.values():
            form.initialize(stacks)

        def view(name: str, entry: StateEntry, member: Member, row: int) -> Tensor:
            rows = stacks[name][row : row + member.layout.batch]
            return rows.view(member.layout.shape_of(entry)).detach()

        pairs = zip(self.members, self.first_row, strict=False)
        return [{name: view(name, x, member, row) for name, x in entries} for member, row in pairs]

    def stack(self, state: States, host: HostMemory | None = None) -> States:
        """Move the state of the members into new stacks. Return state for `open_buckets`: it has
        initial entries for members whose state was deleted.

        A tensor of the state stays the same object, in case the user has a list of them."""
        stacked: dict[Tensor, dict[str, Tensor]] = {}
        moved = set[int]()
        for member, views in zip(self.members, self.allocate(host), strict=True):
            entries = stacked[member.param] = state.get(member.param, views)
            if entries is views:
                continue
            converted = member.layout.converted(entries)
            if converted is not entries:
                entries.clear()
                entries.update(converted)
            for name, view in views.items():
                view.copy_(entries[name])
                if id(entries[name]) in moved or not move_to(entries[name], view):
                    entries[name] = view
                moved.add(id(entries[name]))
        return stacked

    @property
    def temporary_bytes(self) -> int:
        """Limit on the temporary memory of a phase if `bucket_bytes` is not given."""
        return GPU_BYTES if is_gpu(self.device) else BUCKET_BYTES

    def is_stacked(self, state: States) -> bool:
        """Whether the state of the members consists of views of stacks, as `allocate` makes
        them."""
        states = [state.get(member.param, {}) for member in self.members]
        if any(entries.keys() - {REMAINDER} != {"step", *self.entries} for entries in states):
            return False
        for name, entry in self.entries.items():
            first, numel = states[0][name], math.prod(entry.shape)
            if self.offloaded and not is_pinned(first):
                return False
            if entry.dtype == torch.uint8 and first.storage_offset() % 2:
                return False  # codes of 16 bits are read as such
            for entries, member, row in zip(states, self.members, self.first_row, strict=False):
                x, offset = entries[name], first.storage_offset() + row * numel
                form = (offset, member.layout.shape_of(entry), entry.dtype, self.home)
                if (
                    not x.is_contiguous()
                    or (x.storage_offset(), x.shape, x.dtype, x.device) != form
                    or x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                ):
                    return False
        return True


def host_memory(buckets: Iterable[Bucket]) -> HostMemory:
    """Return memory of the host for the stacks of those of the buckets that are offloaded."""
    sizes = Counter[torch.dtype]()
    for bucket in buckets:
        for name, x in bucket.entries.items() if bucket.offloaded else ():
            sizes[x.dtype] += padded(math.prod(bucket.sizes[name]) * x.dtype.itemsize)
    return {dtype: PinnedMemory(size) for dtype, size in sizes.items()}


def move_to(x: Tensor, new: Tensor) -> bool:
    """Give the tensor object `x` the memory of `new`; return whether torch allows it for these
    two."""
    try:
        x.data = new
    except (RuntimeError, TypeError):
        return False
    return True


def make_buckets(members: Iterable[Member], steps: Mapping[int, int]) -> list[Bucket]:
    """Divide the members into as few buckets as possible. The state of several members in a bucket
    is at most `STATE_BYTES`; members with different step counts never share a bucket. `steps`: id
    of a parameter -> its step count, if it is not 0."""

    def sized() -> Iterator[tuple[Member, object, float]]:
        for member in members:
            p, layout = member.param, member.layout
            form = (type(layout), layout.inner, layout.dims, *layout.formats.values())
            rule = (type(layout.rule), layout.rule.offload)
            key = (*form, *rule, p.dtype, member.device, steps.get(id(p)))
            limit = GPU_STATE_BYTES if is_gpu(member.device) else STATE_BYTES
            yield member, key, (4 if layout.elementwise else 1) * layout.state_bytes() / limit

    return [Bucket(batch) for batch in in_batches(sized())]


def in_batches(items: Iterable[tuple[T, Any, float]]) -> list[list[T]]:
    """Divide (item, key, size) into batches of items with equal keys, in order. The total size of a
    batch is at most 1; a larger item is a batch by itself."""
    batches: dict[Any, list[list[T]]] = {}
    room: dict[Any, float] = {}
    for item, key, size in items:
        if room.get(key, -1.0) < size:
            batches.setdefault(key, []).append([])
            room[key] = 1.0
        batches[key][-1].append(item)
        room[key] -= size
    return list(chain(*batches.values()))
