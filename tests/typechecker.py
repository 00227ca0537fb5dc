"""Decides which calls of Lather are checked in tests, and by what: beartype checks functions with shapes in their annotations, mypy the
rest."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Lets an int stand for a float."""

_real = jaxtyping.jaxtyped


def jaxtyped_if_it_has_shapes(*, typechecker: Any) -> Callable[[Any], Any]:
    """Stand in for `jaxtyping.jaxtyped`, whose wrapper takes longer than most functions do."""
    return lambda function: _real(function, typechecker=typechecker) if _has_shapes(function) else function


def _has_shapes(function: Any) -> bool:
    if isinstance(function, property):
        return any(_has_shapes(one) for one in (function.fget, function.fset) if one is not None)
    if isinstance(function, classmethod | staticmethod):
        return _has_shapes(function.__func__)
    if inspect.isclass(function):
        return _has_shapes(function.__init__)
    return any(re.search(r"\b(Bool|Float|Int)\[", str(annotation)) for annotation in getattr(function, "__annotations__", {}).values())
