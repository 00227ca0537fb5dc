"""Agreement of ranks by Python objects: one rank's work for all, and errors that are everybody's."""

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
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """No rank leaves the block before all have come to its end; what one raises inside, all raise there: a rank its own error, or else that
    of the lowest rank that has one.

    For work of some ranks that others build upon, such as writing a file. `group` is the mesh's `control_group`, whose ranks may wait for
    each other as long as that takes; None: one process, nothing to wait for. Ranks that die are the launcher's.

    What is in the block must not wait for another rank: one that has failed is already at the end of it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        if group is None:
            raise
        error = own
    if group is not None:
        errors: list[Exception | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, None if error is None else _portable(error), group=group)
        for each in errors:
            if each is not None:
                if error is not None:
                    raise error
                each.add_note(COPY)
                raise each


def of_first(value: T, group: dist.ProcessGroup | None) -> T:
    """Rank 0's, for all ranks of `group`: for what they might see differently, such as the files of a slow file system."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks of `group`, on rank 0; nothing on the others."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    dist.gather_object(value, values or None, group=group, group_dst=0)
    return cast(list[T], values)


def dealt(values: Sequence[T], group: dist.ProcessGroup | None) -> T:
    """One of rank 0's values for each rank of `group`: this rank's."""
    if group is None:
        (value,) = values
        return value
    found: list[T | None] = [None]
    dist.scatter_object_list(found, list(values) or None, group=group, group_src=0)
    return cast(T, found[0])


def on_first(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """The result of work that rank 0 alone does, for all ranks of `group`; what it raises there, all raise."""
    if group is None:
        return work()
    found: T | None = None
    with together(group):
        if dist.get_rank(group) == 0:
            found = work()
    return cast(T, of_first(found, group))


def _portable(error: Exception) -> Exception:
    """The error as others can have it: not every class can be pickled and made again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
