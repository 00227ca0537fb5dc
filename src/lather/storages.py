"""Finds the tensors in nested values, and follows storages that change their size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, torch.dtype, torch.device)
"""Types of most values that hold no tensor."""


@contextmanager
def following_resizes(notify: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `notify` with every storage after its `resize_` in the block, which is no operation that
    a mode sees."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = original(storage, size)
        notify(storage)
        return out

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and dataclasses, as often as they occur."""
    if isinstance(value, Tensor):
        yield value
    elif value is None or isinstance(value, PLAIN):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
