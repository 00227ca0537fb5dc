"""Counts the peak bytes of live tensors exactly, without sampling: the same number on every
machine.

It inspects the outputs of every operation. Each storage counts once, while it lives and with its
current size. It works on any device, including the meta device, where shapes are run without data.
Trade-off: memory that an operation allocates and frees inside its own C++ code is not seen; use the
statistics of a device's allocator or `torch.profiler` for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor

from lather.storages import following_resizes, tensors_in
from lather.torch_private import TorchDispatchMode

_BORN_AS_INPUT = {torch.ops.aten.lift_fresh.default}
"""Operations whose input is new: `torch.tensor` creates its storage before the first operation that
can be intercepted."""


@dataclass(slots=True)
class _Seen:
    """A live storage that was an input or an output."""

    storage: ref[torch.UntypedStorage]
    """Reports when the storage is deleted."""
    size: int | None
    """Bytes that count; None for a storage that existed before the block."""


class PeakBytes(TorchDispatchMode):
    """`with PeakBytes() as peak: ...` sets `peak.bytes`, counting storages that are created inside
    the block.

    Storages that existed before, views of them and changes in place do not count. A resized storage
    counts with its new size from the next operation, or the end of the block, on.
    """

    def __init__(self, *, count_meta: bool = True) -> None:
        """`count_meta`: whether to count tensors on the meta device, which have a size but no
        memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._count_meta = count_meta
        self.bytes = 0
        """The peak, in bytes."""
        self.now = 0
        """Bytes that are alive now."""
        self._seen: dict[int, _Seen] = {}
        """Storages by `id`."""
        self._around = ExitStack()

    def __enter__(self) -> Self:
        self._around.enter_context(following_resizes(self.resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.bytes = max(self.bytes, self.now)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = self.observe(func, args, kwargs)
        self.bytes = max(self.bytes, self.now)
        return out

    def observe(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Run the operation and record the storages that it creates, without updating the peak."""
        inputs = list(tensors_in([args, kwargs]))
        self._note(inputs, new_ones_count=func in _BORN_AS_INPUT)
        out = func(*args, **(kwargs or {}))
        self._note([*inputs, *tensors_in(out)], new_ones_count=True)
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the size of a storage if it counts."""
        seen = self._seen.get(id(storage))
        if seen is not None and seen.size is not None:
            size = storage.nbytes()
            self.now += size - seen.size
            seen.size = size

    def _note(self, tensors: Iterable[Tensor], *, new_ones_count: bool) -> None:
        """Record the storages of these tensors: those that are new, and the sizes of all others."""
        for tensor in tensors:
            if tensor.is_meta and not self._count_meta:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._seen:
                self.resized(storage)
            else:
                size = storage.nbytes() if new_ones_count else None
                self._seen[key] = _Seen(ref(storage, partial(self._gone, key)), size)
                self.now += size or 0

    def _gone(self, key: int, _: object) -> None:
        size = self._seen.pop(key).size
        self.now -= size or 0
