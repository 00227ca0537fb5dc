"""Converts options to plain Python values, whatever library made them.

Schedules give NumPy scalars; configuration files give sequences and strings of special classes. An
option is converted once, by its type, to bool, int, float, str, tuple, list or dict, and then
compared, checked and saved. Nothing is imported for that: a number is an instance of
`numbers.Real`, has `__index__`, or is an array or tensor with one element."""

from __future__ import annotations

import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

SCALARS = frozenset({bool, int, float, str})
LEAST_RATE = -1e-12
"""Rates between this and 0 are 0: rounding errors of schedules."""


def converted(value: Any, hint: Any) -> Any:
    """Return the value of an option of type `hint` as a plain Python value.

    A tensor stays a tensor if the type allows it, and so does a function. A value that cannot be
    converted is returned as it is: the check of the option's range refuses it."""
    kinds = kinds_of(hint)
    if torch.dtype in kinds:
        return dtype_option(value)
    if value is None or type(value) in kinds or (Tensor in kinds and isinstance(value, Tensor)):
        return value
    if not kinds.isdisjoint(SCALARS):
        value = _without_array(value)
    if isinstance(value, bool) or callable(value):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {converted(key, str): plain(element) for key, element in value.items()}
    if int in kinds and (count := _by(operator.index, value)) is not None:
        return count
    if float in kinds and (isinstance(value, Real) or hasattr(value, "__index__")):
        number = _by(float, value)
        return value if number is None else number
    return _sequence(value, kinds)


def as_count(value: Any) -> Any:
    """Return the int for which a value stands, or the value if it stands for none."""
    return converted(value, int)


def is_count(value: object, minimum: int) -> bool:
    """Whether the plain value is an int of at least `minimum`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def rate_of(lr: Any) -> float:
    """Return a learning rate as a float; NaN if it is no number. A schedule that ends at 0 may end
    a rounding error below it, as torch's `LinearLR` does: that is 0."""
    number = converted(lr, float)
    if type(number) is not float:
        return math.nan
    return 0.0 if LEAST_RATE < number < 0 else number


def plain(value: Any) -> Any:
    """Convert a value of any type to plain Python values. Tensors and arrays with several elements,
    functions and other objects stay as they are."""
    value = _without_array(value)
    if value is None or type(value) in SCALARS:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(element) for key, element in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    return value


def dtype_option(value: Any) -> Any:
    """Return the `state_dtype` for a result of `saveable`, or for text: "bfloat16", or
    "moments=bfloat16,bases=bfloat16" for a dtype of each of these parts."""
    if isinstance(value, str):
        if "=" not in value:
            return getattr(torch, value, value)
        value = dict(part.strip().partition("=")[::2] for part in value.split(","))
    if isinstance(value, Mapping):
        # An empty dict is the default, and in a saved group it would stand for a function.
        return {converted(key, str): dtype_option(dtype) for key, dtype in value.items()} or None
    return value


def saveable(value: Any) -> Any:
    """Return a value of a group in a form that torch's checkpoint tools accept: plain values, names
    of dtypes, lists in the place of arrays, and {} in the place of a function. Tensors stay."""
    if isinstance(value, Tensor):
        return value
    if callable(value):
        return {}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {plain(key): saveable(element) for key, element in value.items()}
    value = plain(value)
    if isinstance(value, list | tuple):
        return type(value)(map(saveable, value))
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def is_placeholder(value: Any) -> bool:
    """Whether a saved value is an empty dict, which stands for a value that was not saved."""
    return isinstance(value, Mapping) and not value


@functools.cache
def kinds_of(hint: Any) -> frozenset[Any]:
    """Return the alternatives of a type: classes, and types with arguments (tuple[float,
    float])."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return kinds_of(args[0])
    if origin in (typing.Union, types.UnionType):
        return frozenset().union(*map(kinds_of, args))
    return frozenset(map(type, args)) if origin is Literal else frozenset({hint})


def _without_array(value: Any) -> Any:
    """Return the element of an array, tensor or NumPy scalar that has only one; any other value as
    it is."""
    item, shape = getattr(value, "item", None), getattr(value, "shape", None)
    if not callable(item) or shape is None or getattr(value, "is_meta", False):
        return value
    return item() if math.prod(shape) == 1 else value


def _by(convert: Callable[[Any], Any], value: Any) -> Any:
    """Return convert(value), or None if the value cannot be converted; an infinity for an integer
    that no float can hold."""
    try:
        return convert(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)
    except (TypeError, ValueError):
        return None


def _sequence(value: Any, kinds: frozenset[Any]) -> Any:
    """Return a sequence or a one-dimensional array as the tuple or list of plain values that a
    type asks for."""
    classes = {typing.get_origin(kind) or kind: kind for kind in kinds}
    wanted: Any = tuple if tuple in classes else list if list in classes else None
    is_array = len(getattr(value, "shape", ())) == 1 and hasattr(value, "tolist")
    is_sequence = isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)
    if wanted is None or not (is_array or is_sequence):
        return value
    elements = value.tolist() if is_array else list(value)
    hints = [hint for hint in typing.get_args(classes[wanted]) if hint is not Ellipsis] or [Any]
    hints += hints[-1:] * len(elements)
    return wanted(plain(converted(x, hint)) for x, hint in zip(elements, hints, strict=False))
