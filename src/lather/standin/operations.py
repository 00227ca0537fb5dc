"""Facts about torch's operations that the stand-in device needs, and helpers for tensors in nested values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

VIEWS = frozenset(
    [
        "detach",
        "alias",
        "lift_fresh",
        "lift",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "unbind",
        "as_strided",
        "diagonal",
        "unfold",
        "chunk",
        "view_as_real",
        "_conj",
        "unsafe_split",
    ]
)
WITHOUT_KERNEL = frozenset(
    [
        "device",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "resize_",
        "set_",
        "record_stream",
        "is_pinned",
        "sym_size",
        "is_same_size",
        "resize_as_",
        "_record_function_enter_new",
        "_record_function_exit",
    ]
)
"""Operations that make memory, or ask."""
COPIES = frozenset(("_to_copy", "copy_"))
RANDOM = frozenset(("normal_", "uniform_", "random_", "bernoulli_"))
SHAPES: dict[str, Callable[..., Any]] = {
    "_grouped_mm": lambda a, b, offs=None, bias=None, out_dtype=None: _grouped_product(a, b, offs, out_dtype),
    "geqrf": lambda a: (torch.empty_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))),
}
"""Results of operations for which torch has no shapes on the meta device, or not for all dtypes that the CPU takes."""
TAKE_INDICES = frozenset(["index", "index_put_", "index_put", "_index_put_impl_"])
CARRY_FLAGS = frozenset(
    ["any", "cat", "stack", "bitwise_or", "bitwise_or_", "__or__", "__ior__", "logical_or", "where", "index_select", "_to_copy", "clone"]
)
"""Operations whose results have the flags of their operands."""


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """A product per group: groups are the leading dim, or runs of the dim that 2-D operands have in common with `offs`."""
    groups = offs.numel() if offs is not None and a.dim() == b.dim() == 2 else 0
    leading = (groups,) if groups else a.shape[:1] if a.dim() == 3 and b.dim() == 3 else ()
    return a.new_empty((*leading, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


def name_of(func: Any) -> str:
    """Without namespace and overload."""
    return str(func._schema.name).partition("::")[2]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def mapped(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The same nested values, with other tensors."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, list | tuple):
        return type(values)([mapped(function, value) for value in values])
    if isinstance(values, dict):
        return {key: mapped(function, value) for key, value in values.items()}
    return values


def nbytes(x: Tensor) -> int:
    """Bytes of elements that differ in their place: an expanded dim counts once."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


def truth(name: str, args: Sequence[Any]) -> bool | None:
    """The value that a tensor of flags is said to have: all is finite. Of other comparisons nothing is known (None), and a reader finds
    that none holds."""
    known: list[bool | None] = [getattr(x, "lather_truth", None) for x in tensors_in(args) if x.dtype == torch.bool]
    if name == "isfinite":
        return True
    if name in ("bitwise_not", "logical_not"):
        return None if known[0] is None else not known[0]
    if name in ("bitwise_and", "logical_and", "all"):
        return None if None in known else all(known)
    if name in CARRY_FLAGS or name in VIEWS:
        return True if True in known else None if None in known else False
    return None


ATTENTION = "_scaled_dot_product_"
"""How the names of fused attention begin. torch 2.11's table refuses fewer heads of keys than of queries."""


def flops(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Flops of products, attention and factorisations; causal masks save nothing, elementwise work counts nothing."""
    formula = None if name.startswith(ATTENTION) else flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else _other_flops(name, args)


def _other_flops(name: str, args: Sequence[Any]) -> int:
    """Flops of operations that torch's own table (`torch.utils.flop_counter`) lacks."""
    if name.startswith(ATTENTION):
        backward = name.endswith("_backward")
        q_BHSU, k_BGTU, v_BGTV = args[1:4] if backward else args[:3]
        u, v = q_BHSU.shape[-1], v_BGTV.shape[-1]
        return int(2 * math.prod(q_BHSU.shape[:3]) * k_BGTU.shape[2] * (3 * u + 2 * v if backward else u + v))
    if name == "_grouped_mm":  # rows by expert times a matrix each, or a product for each expert over its rows
        return int(2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1])
    if name in ("addmm_", "baddbmm_"):
        return int(2 * args[1].numel() * args[2].shape[-1])
    if name == "linalg_solve_triangular":
        return int(args[1].numel() * args[0].shape[-1])
    if name in ("linalg_cholesky_ex", "geqrf", "linalg_householder_product", "_linalg_eigh", "_linalg_svd"):
        n = args[0].shape[-1]
        cubes = {"linalg_cholesky_ex": 1 / 3, "_linalg_eigh": 9.0, "_linalg_svd": 22.0}.get(name, 4 / 3)
        return int(cubes * args[0].numel() * n)
    return 0
