"""Agreement between ranks on Python objects: work that one rank does for all, and errors that all
ranks raise."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import torch.distributed as dist

from lather.parallel.launch.lifeline import COPY

T = TypeVar("T")


@contextlib.contextmanager
def errors_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Wait at the end of the block for all ranks. If any rank raises inside, every rank raises: its
    own error, or else that of the lowest rank that has one.

    Use it for work of some ranks on which others depend, such as writing a file. `group` is the
    mesh's `control_group`, on which ranks may wait as long as the work takes; None: a single
    process. The launcher deals with ranks that die.

    The block must not wait for another rank: one that has failed is already at the end of the
    block.
    """
    if group is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, None if error is None else _portable(error), group=group)
    if error is not None:
        raise error
    for other in filter(None, errors):
        other.add_note(COPY)
        raise other


def broadcast(value: T, group: dist.ProcessGroup | None) -> T:
    """Return rank 0's value on all ranks of `group`, for values that ranks might see differently,
    such as the entries of a slow file system."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of `group` on rank 0, and an empty list on the others."""
    if group is None:
        return [value]
    values: list[T | None] = (
        [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    )
    dist.gather_object(value, values or None, group=group, group_dst=0)
    return cast(list[T], values)


def scatter(values: Sequence[T], group: dist.ProcessGroup | None) -> T:
    """Distribute rank 0's values, one to each rank of `group`, and return this rank's."""
    if group is None:
        (value,) = values
        return value
    received: list[T | None] = [None]
    dist.scatter_object_list(received, list(values) or None, group=group, group_src=0)
    return cast(T, received[0])


def on_rank_0(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Do the work on rank 0 alone and return its result on all ranks of `group`; if it raises
    there, all ranks raise."""
    if group is None:
        return work()
    result: T | None = None
    with errors_on_all_ranks(group):
        if dist.get_rank(group) == 0:
            result = work()
    return cast(T, broadcast(result, group))


def _portable(error: Exception) -> Exception:
    """Return the error in a form that can be sent: not every exception can be pickled and
    unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
