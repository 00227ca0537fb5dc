"""Counts the peak bytes of live tensors exactly, without sampling: the same number on every machine.

It inspects the outputs of every operation. Each storage counts once, while it lives and with its current size. It works on any device,
including the meta device, where shapes are run without data. Trade-off: memory that an operation allocates and frees inside its own C++
code is not seen; use the statistics of a device's allocator or `torch.profiler` for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lather.torch_private import TorchDispatchMode

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
        self._alive: dict[int, ref[torch.UntypedStorage]] = {}
        self._from_before: dict[int, ref[torch.UntypedStorage]] = {}

    @property
    def now(self) -> int:
        """Bytes that are alive now."""
        storages = [storage() for storage in list(self._alive.values())]
        return sum([storage.nbytes() for storage in storages if storage is not None])

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.bytes = max(self.bytes, self.now)
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]

    def _enter(self, values: Any, among: dict[int, ref[torch.UntypedStorage]]) -> None:
        """Record the storages in `values` that are new, while they live."""
        pending = [values]
        while pending:
            value = pending.pop()
            if isinstance(value, Tensor):
                if value.is_meta and not self._count_meta:
                    continue
                storage = value.untyped_storage()
                key = id(storage)
                if key not in self._alive and key not in self._from_before:
                    among[key] = ref(storage, partial(_forget, among, key))
            elif isinstance(value, list | tuple):
                pending.extend(value)
            elif isinstance(value, dict):
                pending.extend(value.values())


def _forget(among: dict[int, ref[torch.UntypedStorage]], key: int, _: ref[torch.UntypedStorage]) -> None:
    del among[key]
