"""Counts the peak bytes of live tensors exactly, without sampling: the same number on every machine.

It inspects the outputs of every operation. Each storage counts once, while it lives and with its current size. It works on any device,
including the meta device, where shapes are run without data. Trade-off: memory that an operation allocates and frees inside its own C++
code is not seen; use the statistics of a device's allocator or `torch.profiler` for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lather.torch_private import TorchDispatchMode

Storages = WeakValueDictionary[int, torch.UntypedStorage]
"""Storages by `id`, while they live."""

_BORN_AS_INPUT = {torch.ops.aten.lift_fresh.default}
"""Operations whose input is new: `torch.tensor` creates its storage before the first operation that can be intercepted."""


class PeakBytes(TorchDispatchMode):
    """`with PeakBytes() as peak: ...` sets `peak.bytes`, counting storages that are created inside the block.

    Storages that existed before, views of them and changes in place do not count. A resized storage counts with its new size from the next
    operation, or the end of the block, on.
    """

    bytes: int
    """The peak, in bytes."""

    def __init__(self, *, count_meta: bool = True) -> None:
        """`count_meta`: whether to count tensors on the meta device, which have a size but no memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._count_meta = count_meta
        self.bytes = 0
        self._alive: Storages = WeakValueDictionary()
        self._from_before: Storages = WeakValueDictionary()

    @property
    def now(self) -> int:
        """Bytes that are alive now."""
        return sum(storage.nbytes() for storage in self._alive.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = self.observe(func, args, kwargs)
        self.bytes = max(self.bytes, self.now)
        return out

    def observe(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Run the operation and record the storages that it creates, without updating the peak."""
        self._enter([args, kwargs], self._alive if func in _BORN_AS_INPUT else self._from_before)
        out = func(*args, **(kwargs or {}))
        self._enter(out, self._alive)
        return out

    def __exit__(self, *error: Any) -> None:
        self.bytes = max(self.bytes, self.now)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, values: Any, among: Storages) -> None:
        """Record the storages in `values` that are new, while they live."""
        for tensor in tensors_in(values):
            if tensor.is_meta and not self._count_meta:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self._alive and id(storage) not in self._from_before:
                among[id(storage)] = storage


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and dataclasses, as often as they occur."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
