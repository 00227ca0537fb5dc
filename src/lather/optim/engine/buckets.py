"""Buckets: parameters whose matrices have equal shapes and state share stacked state tensors.

A stack is a state tensor with a leading batch dim over the matrices of several parameters, in the order of the parameter groups;
`optimizer.state[p]` holds views of the rows that belong to p.

A member of a bucket is the part of a parameter on which this rank works. It has the same interface in all three cases: gradient and weight
as tensors of one shape, and the tensor that an update changes.

    index ()         a parameter that is not spread over ranks, or this rank's whole part of one that is
    index (slices)   the rows of this rank's part that this rank owns
    index None       matrices that this rank owns and gathers: gradients arrive from other ranks, and updates are sent back to them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lather.device import gpu_module, is_gpu
from lather.optim.engine.matrix_layout import Layout
from lather.optim.engine.roster import ParamInfo
from lather.optim.sharded.owners import OwnedParameter
from lather.optim.sharded.placement import Index, local, local_grad

BUCKET_BYTES = 2**28
"""Limit on the temporary memory of a step on a CPU if `bucket_bytes` is not given."""

LEAST_GPU_BYTES = 2**31
"""Smallest such limit on a GPU, where the largest is twice as much: about 20 matrices of 2048 rows then form a batch."""


@dataclass(eq=False)
class Member:
    """One parameter in a bucket."""

    param: Tensor
    """Parameter as it was given to the optimizer."""
    layout: Layout
    """Layout of the part on which this rank works."""
    numbers: Sequence[int]
    """Numbers of the member's matrices among those of the whole parameter."""
    index: Index | None
    received: Tensor | None = None
    """Gathered gradient, during a step. This field and the next two are for `index` None only."""
    received_weight: Tensor | None = None
    """Gathered weight, if the update depends on it."""
    update: Tensor | None = None
    """Tensor into which the update is written before it is sent."""

    @property
    def device(self) -> torch.device:
        return self.param.device

    def grad(self) -> Tensor:
        """Return the gradient, which nobody may change."""
        if self.index is None:
            assert self.received is not None
            return self.received
        return local_grad(self.param)[self.index]

    def weight(self) -> Tensor:
        """Return the weight: a view of the parameter, or the gathered weight."""
        if self.index is None:
            assert self.received_weight is not None
            return self.received_weight
        return local(self.param)[self.index]

    def target(self) -> Tensor:
        """Return the tensor that an update changes: a view of the parameter, or the update that is to be sent."""
        return self.weight() if self.update is None else self.update


def member_of(one: ParamInfo, share: OwnedParameter | None) -> Member | None:
    """Return the member for this rank's work on a parameter, or None if it has none."""
    if share is None:
        return Member(one.param, one.layout, range(one.layout.batch), ())
    if not share.own:
        return None
    numbers = tuple(unit.number for unit in share.own)
    if share.in_place:
        index = share.region.within(share.spread.box)
        layout = one.layout.of_part(share.region.size, contiguous=local(one.param)[index].is_contiguous())
        return Member(one.param, layout, range(layout.batch) if share.elementwise else numbers, index)
    shape = one.layout.shape
    if one.layout.kind == "per_expert":
        shape = (len(numbers), *shape[1:])
    return Member(one.param, one.layout.of_part(shape), numbers, None)


class Bucket:
    """Members whose matrices have equal shape, dtype, device and entries of state, with their stacked state: name -> (rows, ...)."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.first_row = [0, *accumulate(member.layout.batch for member in members)]
        layout = members[0].layout
        self.kind, self.inner, self.dims, self.has_experts = layout.kind, layout.inner, layout.dims, layout.has_experts
        self.device = members[0].device
        self.entries = layout.entries
        self.stacks = {name: entry.allocate(self.first_row[-1], self.device) for name, entry in self.entries.items()}
        self.views = [
            {name: stack[start:stop].view(self.entries[name].shape_in(member.layout)) for name, stack in self.stacks.items()}
            for (start, stop), member in zip(pairwise(self.first_row), self.members, strict=True)
        ]

    @cached_property
    def temporary_bytes(self) -> int:
        """Limit on the temporary memory of a phase if `bucket_bytes` is not given. It is computed once, so that batches stay the same."""
        if not is_gpu(self.device):
            return BUCKET_BYTES
        ask = getattr(gpu_module(self.device), "mem_get_info", None)
        free = ask(self.device)[0] if ask is not None else 0
        return min(max(free // 4, LEAST_GPU_BYTES), 2 * LEAST_GPU_BYTES)

    def holds(self, number: int, state: Mapping[str, Tensor]) -> bool:
        """Whether `state` still consists of this bucket's views for member `number`."""
        views = self.views[number]
        return len(state) == len(views) + 1 and all(state.get(name) is view for name, view in views.items())


def make_buckets(members: Iterable[Member], *, apart: Mapping[int, Any] | None = None) -> list[Bucket]:
    """Divide the members into as few buckets as possible; members with different values in `apart` (by id of the parameter) never share
    one."""
    alike: dict[Any, list[Member]] = {}
    for member in members:
        layout = member.layout
        entries = tuple(layout.entries.items())
        own = (layout.kind, layout.inner, layout.dims, entries, member.param.dtype, member.device, type(layout.rule))
        alike.setdefault((*own, (apart or {}).get(id(member.param))), []).append(member)
    return [Bucket(same) for same in alike.values()]
