"""Decides which calls of Lather are checked in tests, and by what: beartype checks functions with
shapes in their annotations, mypy the rest."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Lets an int stand for a float."""

_real = jaxtyping.jaxtyped
CHECKED_CALLS = 3
"""Calls of a function that are checked in each test: a check takes longer than most functions
do."""
_calls: Counter[int] = Counter()


def forget_calls() -> None:
    """Check the next calls of every function again."""
    _calls.clear()


def jaxtyped_if_it_has_shapes(*, typechecker: Any) -> Callable[[Any], Any]:
    """Stand in for `jaxtyping.jaxtyped`, which checks every function at every call."""

    def decorate(function: Any) -> Any:
        if not _has_shapes(function):
            return function
        always = _real(function, typechecker=typechecker)
        if not inspect.isfunction(function):
            return always
        number = id(always)

        @functools.wraps(function)
        def at_first(*arguments: Any, **options: Any) -> Any:
            _calls[number] += 1
            return (always if _calls[number] <= CHECKED_CALLS else function)(*arguments, **options)

        return at_first

    return decorate


def _has_shapes(function: Any) -> bool:
    if isinstance(function, property):
        return any(_has_shapes(one) for one in (function.fget, function.fset) if one is not None)
    if isinstance(function, classmethod | staticmethod):
        return _has_shapes(function.__func__)
    if inspect.isclass(function):
        return _has_shapes(function.__init__)
    return any(
        re.search(r"\b(Bool|Float|Int)\[", str(annotation))
        for annotation in getattr(function, "__annotations__", {}).values()
    )
