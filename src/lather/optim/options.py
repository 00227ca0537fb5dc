"""Options of rules: their types, with the range of valid values, and their documentation.

A rule is a dataclass, and a field of it defines an option completely: its name, its type with the
range, its default, and its documentation in the string under it. From the fields come the
conversion to plain values and the checks at construction, the documentation of the optimizers,
`[optim]` of the trainer, `--help` and the tables in docs/.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lather.optim.plain import converted, is_count, kinds_of, rate_of

MAX_BF16_BETA = 1 - 2**-8
"""Largest decay rate that has an effect on a bf16 moment, which has 8 significant bits."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The valid values of an option, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def holds(condition: Callable[..., Any], *values: Any) -> bool:
    """Whether a condition holds for values of any type. Values that it cannot compare, for example
    arrays of several elements, do not fulfill it."""
    try:
        return bool(condition(*values))
    except (RuntimeError, TypeError, ValueError):
        return False


def is_number(value: Any, minimum: float = 0.0, below: float = math.inf) -> bool:
    """Whether the plain value is an int or float, no bool, and finite, in [minimum, below)."""
    is_finite = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    return is_finite and minimum <= value < below


def at_least(minimum: int, more: str = "") -> Range:
    """Return the range of the integers from `minimum` on; `more` is added to its description."""
    return Range(f"an integer >= {minimum}{more}", lambda value: is_count(value, minimum))


def _is_pair(betas: Any) -> bool:
    return (
        isinstance(betas, tuple | list)
        and len(betas) == 2
        and all(is_number(beta, below=1.0) for beta in betas)
    )


def _is_rate(lr: Any) -> bool:
    if isinstance(lr, Tensor):
        return lr.numel() == 1 and is_number(rate_of(lr))
    return is_number(lr) or (isinstance(lr, float) and is_number(rate_of(lr)))


def _is_state_dtype(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Mapping):
        return set(value) <= {"moments", "bases", "factors"} and all(
            dtype in (torch.float32, torch.bfloat16, torch.int8)
            or (part, dtype) == ("factors", torch.int16)
            for part, dtype in value.items()
        )
    return value in (torch.float32, torch.float64, torch.bfloat16, torch.int8)


Rate = Annotated[float | Tensor, Range("a number >= 0", _is_rate)]
NonNegative = Annotated[float, Range("a number >= 0", is_number)]
Positive = Annotated[float, Range("a number > 0", lambda value: is_number(value) and value > 0)]
Decay = Annotated[float, Range("a number in [0, 1)", lambda beta: is_number(beta, below=1.0))]
Betas = Annotated[tuple[float, float], Range("two numbers in [0, 1)", _is_pair)]
Fraction = Annotated[
    float, Range("a number in [0, 1]", lambda value: is_number(value) and value <= 1)
]
Size = Annotated[
    float | None,
    Range("a number > 0 or None", lambda x: x is None or (is_number(x) and x > 0)),
]
Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0)]
Interval = Annotated[
    int | Callable[[int], int],
    Range("an integer >= 1 or a callable of the step", lambda f: callable(f) or is_count(f, 1)),
]
Scale = Annotated[
    str | float,
    Range(
        "'match_rms_adamw', 'spectral' or a number > 0",
        lambda s: s in ("match_rms_adamw", "spectral") or (is_number(s) and s > 0),
    ),
]
Extent = Annotated[
    int | None, Range("an integer >= 1 or None", lambda size: size is None or is_count(size, 1))
]
Precision = Literal["auto", "highest", "high", "medium"]
BY_PART = (
    "{'moments': dtype, 'bases': dtype, 'factors': dtype} of fp32, bf16, int8, or int16 for factors"
)
"""The value of `state_dtype` that sets the dtype of each part, in words."""
StateDtype = Annotated[
    torch.dtype | Mapping[str, torch.dtype] | str | None,
    Range(
        f"torch.float32, torch.float64, torch.bfloat16, torch.int8, {BY_PART}, or None",
        _is_state_dtype,
    ),
]


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a rule, as its field defines it."""

    name: str
    default: Any
    """Default value, or `dataclasses.MISSING` if it has none."""
    hint: Any
    """Type of the option, without the range."""
    range: Range | None
    """Valid values; None: all values of the type."""

    @functools.cached_property
    def plain_types(self) -> frozenset[Any]:
        """Classes whose values are plain values of this type already."""
        kinds = kinds_of(self.hint)
        return kinds - {str} if torch.dtype in kinds else kinds

    def plain(self, value: Any) -> Any:
        """Return a value as a plain Python value of this type (`lather.optim.plain.converted`)."""
        return value if type(value) in self.plain_types else converted(value, self.hint)


def name_of(rule: type) -> str:
    """Return the name of a rule in parameter groups, saved optimizers and `[optim]`."""
    return rule.__dict__.get("name") or f"{rule.__module__}:{rule.__qualname__}"


def options_of(rule: type) -> dict[str, Option]:
    """Return the options of a rule by name, in the order of its fields, without `tp_group`, which
    parameter groups cannot set."""
    return _options_of(rule)  # mypy takes no class for hashable


@functools.cache
def _options_of(rule: type) -> dict[str, Option]:
    # `typing.get_type_hints` would evaluate a lambda in a range without its module's names.
    hints = dict[str, Any]()
    for cls in reversed(rule.__mro__):
        names = vars(sys.modules[cls.__module__])
        for name, hint in inspect.get_annotations(cls).items():
            hints[name] = eval(hint, names, dict(vars(cls))) if isinstance(hint, str) else hint
    fields = [field for field in dataclasses.fields(rule) if field.metadata.get("group", True)]
    fields.sort(key=lambda field: bool(field.kw_only))  # as its constructor takes them
    return {
        field.name: Option(field.name, field.default, *_hint_and_range(hints[field.name]))
        for field in fields
    }


def _hint_and_range(annotation: Any) -> tuple[Any, Range | None]:
    if typing.get_origin(annotation) is Annotated:
        hint, *more = typing.get_args(annotation)
        return hint, next((x for x in more if isinstance(x, Range)), None)
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        words = "one of " + ", ".join(repr(choice) for choice in choices)
        return annotation, Range(words, lambda value: isinstance(value, str) and value in choices)
    if annotation is bool:
        return bool, Range("True or False", lambda value: isinstance(value, bool))
    return annotation, None


def check(rule: Any) -> None:
    """Replace the options of a new rule by plain values. Raise ValueError for an option out of
    range, and for a decay rate without effect on bf16 moments."""
    for name, option in options_of(type(rule)).items():
        value = option.plain(getattr(rule, name))
        object.__setattr__(rule, name, value)
        if option.range is not None and not holds(option.range.holds, value):
            raise ValueError(f"{name}={value!r} is not valid: give {option.range.words}")
    for name in rule.moment_decays if rule.dtypes["moment"] is torch.bfloat16 else ():
        value = getattr(rule, name, 0.0)
        if max(value if isinstance(value, tuple | list) else (value,)) > MAX_BF16_BETA:
            raise ValueError(
                f"{name}={value!r} with bf16 moments: a moment that decays by less than 1 part in "
                "256 per step is rounded back to "
                f"what it was. Give {name} up to {MAX_BF16_BETA}, or keep the moments in fp32: "
                f"state_dtype={{'bases': torch.bfloat16}}"
            )
    if rule.offload:
        _check_offload(rule)
    _check_heads(rule)


def _check_heads(rule: Any) -> None:
    """Raise ValueError unless `per_head` has one size of heads, and other layouts have none."""
    sizes = {name: getattr(rule, name) for name in ("head_rows", "head_columns")}
    given = " and ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
    is_per_head = rule.matrix_layout == "per_head"
    if given and not is_per_head:
        raise ValueError(
            f"{given} with matrix_layout={rule.matrix_layout!r} is not valid: give "
            "matrix_layout='per_head', or no size of heads"
        )
    if is_per_head and sum(size is not None for size in sizes.values()) != 1:
        raise ValueError(
            f"matrix_layout='per_head' with {given or 'no size of a head'} is not valid: give "
            "head_rows, the rows of a head (weights are (out, in)), or head_columns"
        )


NEEDED_BY_OFFLOAD: Mapping[str, tuple[Any, str]] = {
    "async_refresh": (False, "bases are refreshed while their matrices visit the GPU"),
    "num_streams": (1, "copies have streams of their own, beside that of the step"),
    "ownership": ("whole", "every rank would fetch the rows of all"),
}
"""Values of other options without which `offload` is refused, and why."""


def _check_offload(rule: Any) -> None:
    """Raise ValueError for an option with another value than `offload` needs."""
    for name, (needed, reason) in NEEDED_BY_OFFLOAD.items():
        value = getattr(rule, name, needed)
        if value != needed:
            raise ValueError(
                f"offload=True with {name}={value!r}: {reason}; set {name}={needed!r}, or leave "
                "offload out"
            )


def documentation_of(rule: type) -> dict[str, str]:
    """Return the string under the field of each option; empty if the source code is not available.
    Parsing the source is slow."""
    texts = {}
    for cls in reversed(rule.__mro__):
        body = _classes_of(cls.__module__).get(cls.__qualname__, [])
        for field_and_string in itertools.pairwise(body):
            match field_and_string:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    texts[name] = " ".join(text.split())
    return texts


@functools.cache
def _classes_of(module: str) -> dict[str, list[ast.stmt]]:
    """Return the bodies of the top-level classes of a module by name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
