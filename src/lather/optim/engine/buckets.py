"""Buckets: parameters whose matrices are alike share one stack of state.

A bucket holds the state of several parameters as tensors with a leading batch dim over all their matrices, in the order of the
parameter groups; `optimizer.state[p]` holds views of its slice.
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
"""Temporary memory of a step where `bucket_bytes` does not say."""

LEAST_GPU_BYTES = 2**31
"""The same on a GPU: at least this and at most twice this, so that about 20 matrices of 2048 rows make a batch."""


class Bucket:
    """Members with equal matrices, dtype, device and kinds of state, and their state stacked: name -> (rows, ...)."""

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
        """Temporary memory of a phase where `bucket_bytes` does not say; asked for once, so that batches stay as they are."""
        if not is_gpu(self.device):
            return BUCKET_BYTES
        ask = getattr(gpu_module(self.device), "mem_get_info", None)
        free = ask(self.device)[0] if ask is not None else 0
        return min(max(free // 4, LEAST_GPU_BYTES), 2 * LEAST_GPU_BYTES)

    def holds(self, number: int, state: Mapping[str, Tensor]) -> bool:
        """Whether the state of member `number` is still its views."""
        views = self.views[number]
        return len(state) == len(views) + 1 and all(state.get(name) is view for name, view in views.items())


def make_buckets(members: Iterable[Member], *, apart: Mapping[int, Any] | None = None) -> list[Bucket]:
    """The fewest buckets for these members; those with different values in `apart` (by id of the parameter) stay apart."""
    alike: dict[Any, list[Member]] = {}
    for member in members:
        layout = member.layout
        entries = tuple(kept_entries(layout).items())
        own = (layout.kind, layout.inner, layout.dims, entries, member.param.dtype, member.device, type(layout.rule))
        alike.setdefault((*own, (apart or {}).get(id(member.param))), []).append(member)
    return [Bucket(same) for same in alike.values()]
