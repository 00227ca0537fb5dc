"""Buckets: parameters whose matrices have equal shapes and state share stacked state tensors.

A stack is a state tensor with a leading batch dim over the matrices of several parameters, in the order of the parameter groups;
`optimizer.state[p]` holds views of the rows that belong to p.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from lather.device import gpu_module, is_gpu
from lather.optim.engine.members import Member
from lather.optim.engine.state import kept_entries

BUCKET_BYTES = 2**28
"""Limit on the temporary memory of a step on a CPU if `bucket_bytes` is not given."""

LEAST_GPU_BYTES = 2**31
"""Smallest such limit on a GPU, where the largest is twice as much: about 20 matrices of 2048 rows then form a batch."""


class Bucket:
    """Members whose matrices have equal shape, dtype, device and entries of state, with their stacked state: name -> (rows, ...)."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.first_row = [0, *accumulate(member.layout.batch for member in members)]
        layout = members[0].layout
        self.kind, self.inner, self.dims = layout.kind, layout.inner, layout.dims
        self.has_experts = layout.kind == "per_expert" and bool(layout.dims)
        self.device = members[0].device
        self.entries = kept_entries(layout)
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
        entries = tuple(kept_entries(layout).items())
        own = (layout.kind, layout.inner, layout.dims, entries, member.param.dtype, member.device, type(layout.rule))
        alike.setdefault((*own, (apart or {}).get(id(member.param))), []).append(member)
    return [Bucket(same) for same in alike.values()]
