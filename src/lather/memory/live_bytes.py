"""The largest number of bytes of tensors alive at one time, counted and not sampled: the same number on every machine.

Every operation's outputs are looked at, and each storage counts once, for as long as it lives and with its size of the moment. It works on
any device, the meta device too, where shapes are run without data. Trade-off: what an operation allocates and frees inside its own C++
code is not seen; for that there are a device's allocator statistics or `torch.profiler`.
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
"""`torch.tensor` makes its storage before the first operation that can be seen."""


class PeakBytes(TorchDispatchMode):
    """`with PeakBytes() as peak: ...` gives `peak.bytes`, of storages that were made inside the block.

    Storages from before it, views of them and changes in place count nothing. A storage that is resized counts with its new size from the
    next operation on (or the end of the block).
    """

    bytes: int
    """The largest sum of sizes at one time, in bytes."""

    def __init__(self, *, count_meta: bool = True) -> None:
        """`count_meta`: whether tensors on the meta device, which have a size and no memory, count, too."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._count_meta = count_meta
        self.bytes = 0
        self._alive: dict[int, ref[torch.UntypedStorage]] = {}
        self._from_before: dict[int, ref[torch.UntypedStorage]] = {}

    @property
    def now(self) -> int:
        """Bytes alive at this moment."""
        storages = [storage() for storage in list(self._alive.values())]
        return sum([storage.nbytes() for storage in storages if storage is not None])

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = self.observe(func, args, kwargs)
        self.bytes = max(self.bytes, self.now)
        return out

    def observe(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Run the operation and note what it made, without adding up."""
        self._enter([args, kwargs], self._alive if func in _BORN_AS_INPUT else self._from_before)
        out = func(*args, **(kwargs or {}))
        self._enter(out, self._alive)
        return out

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.bytes = max(self.bytes, self.now)
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]

    def _enter(self, values: Any, among: dict[int, ref[torch.UntypedStorage]]) -> None:
        """Note the storages in `values` that are new, for as long as they live."""
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
