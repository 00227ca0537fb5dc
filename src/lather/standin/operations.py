"""Tables of torch's operations for the stand-in device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


class RanOperation(NamedTuple):
    """An operation that has run on the device."""

    func: Any
    name: str
    """Name without namespace and overload."""
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    made: list[Tensor]
    """The tensors in `out`."""
    out: Any


VIEWS = frozenset(["_unsafe_view", "lift", "unsafe_split"])
"""Views whose schema does not say so; of all others torch says it (`func.is_view`)."""
COPIES = frozenset(("_to_copy", "copy_"))
RANDOM = frozenset(("normal_", "uniform_", "random_", "bernoulli_"))
SHAPES: dict[str, Callable[..., Any]] = {
    "_grouped_mm": lambda a, b, offs=None, bias=None, out_dtype=None: _grouped_product(
        a, b, offs, out_dtype
    ),
    "addmm": lambda total, a, b, out_dtype=None, *, out=None, **scales: (
        a.new_empty((len(a), b.shape[1]), dtype=out_dtype or a.dtype) if out is None else out
    ),
    "baddbmm": lambda total, a, b, out_dtype=None, *, out=None, **scales: (
        a.new_empty((*a.shape[:2], b.shape[2]), dtype=out_dtype or a.dtype) if out is None else out
    ),
    "_fused_sgd_": lambda *tensors, **options: None,
    "geqrf": lambda a: (torch.empty_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))),
}
"""Results of operations for which torch has no shape function on the meta device, or not for all
dtypes that the CPU accepts. (Those of `addmm` and `baddbmm` fail for `out_dtype`, the former in
torch 2.11.)"""
TAKE_INDICES = frozenset(["index", "index_put_", "index_put", "_index_put_impl_"])
READS = frozenset(["_local_scalar_dense", "nonzero"])
"""Operations whose result, or its size, depends on values of a tensor."""


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Return the result of a product per group: groups are the leading dim, or runs, by `offs`, of
    the dim that 2-D operands share."""
    groups = offs.numel() if offs is not None and a.dim() == b.dim() == 2 else 0
    leading = (groups,) if groups else a.shape[:1] if a.dim() == 3 and b.dim() == 3 else ()
    return a.new_empty((*leading, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


def name_of(func: Any) -> str:
    """Return the name without namespace and overload."""
    return str(func._schema.name).partition("::")[2]


def mapped(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return the same nested values with the function applied to every tensor."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, list | tuple):
        return type(values)([mapped(function, value) for value in values])
    if isinstance(values, dict):
        return {key: mapped(function, value) for key, value in values.items()}
    return values


def nbytes(x: Tensor) -> int:
    """Return the bytes of elements at different places: an expanded dim counts once."""
    return (
        math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
        * x.element_size()
    )


SUMMED_PRODUCTS = frozenset(["addmm", "addmm_", "baddbmm", "baddbmm_"])
"""Products that are added to a sum; torch's formulas reject `out_dtype` for these and `bmm`."""
ATTENTION = "_scaled_dot_product_"
"""Prefix of the names of fused attention. The formulas of torch 2.11 reject fewer heads of keys
than of queries."""


def flops(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the flops of products, attention and factorizations; causal masks save nothing, and
    elementwise work counts nothing."""
    is_ours = name.startswith(ATTENTION) or name in SUMMED_PRODUCTS or name == "bmm"
    formula = None if is_ours else flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else _other_flops(name, args)


def _other_flops(name: str, args: Sequence[Any]) -> int:
    """Return the flops of operations that torch's table (`torch.utils.flop_counter`) lacks."""
    if name.startswith(ATTENTION):
        backward = name.endswith("_backward")
        q_BHSU, k_BGTU, v_BGTV = args[1:4] if backward else args[:3]
        u, v = q_BHSU.shape[-1], v_BGTV.shape[-1]
        return (
            2
            * math.prod(q_BHSU.shape[:3])
            * k_BGTU.shape[2]
            * (3 * u + 2 * v if backward else u + v)
        )
    # rows by expert times a matrix each, or a product for each expert over its rows
    if name == "_grouped_mm":
        return 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    if name in SUMMED_PRODUCTS:
        return 2 * args[1].numel() * args[2].shape[-1]
    if name == "bmm":
        return 2 * args[0].numel() * args[1].shape[-1]
    if name == "linalg_solve_triangular":
        return args[1].numel() * args[0].shape[-1]
    if name in (
        "linalg_cholesky_ex",
        "geqrf",
        "linalg_householder_product",
        "_linalg_eigh",
        "_linalg_svd",
    ):
        n = args[0].shape[-1]
        cubes = {"linalg_cholesky_ex": 1 / 3, "_linalg_eigh": 9.0, "_linalg_svd": 22.0}.get(
            name, 4 / 3
        )
        return int(cubes * args[0].numel() * n)
    return 0
