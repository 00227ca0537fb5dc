"""Names the parts of a step for profilers: those of torch, which `profile.steps` uses, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd.profiler import record_function

from lather.torch_private import profiler_is_on

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "lather."
"""Beginning of the names of all ranges."""


class profiled:  # noqa: N801 (it is used like a function)
    """A block, or with a decorator each call of a function, as a range of a profile. Without a
    profiler this takes some tenths of a microsecond, where `record_function` takes several whole
    ones."""

    __slots__ = ("_name", "_range")

    def __init__(self, name: str) -> None:
        """`name`: that of the range without `lather.`"""
        self._name = name
        self._range: record_function | None = None

    def __enter__(self) -> None:
        if profiler_is_on():
            self._range = record_function(PREFIX + self._name)
            self._range.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._range is not None:
            self._range.__exit__(*exc)
            self._range = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with profiled(self._name):
                return function(*args, **kwargs)

        return run
