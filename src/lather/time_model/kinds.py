"""Says of which kind a kernel is, in the time model (`lather.time_model.rates`), and whether
a GPU computes half of its flops.

A kernel that stands in no table here is of the kind "unknown", and is listed. **A new Triton kernel
needs a line in `TRITON`**, and one with products (`tl.dot`) another in `TRITON_FLOPS`: a launch
says nothing of its flops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lather.kernels.symmetric_product import num_flops
from lather.standin.operations import ATTENTION, COPIES, SUMMED_PRODUCTS
from lather.time_model.operations import GATHERS, ONE_BY_ONE, SCATTERS, source_of
from lather.time_model.rates import TRANSFERS, UNKNOWN
from lather.torch_private import get_fp32_precision

PRODUCTS = frozenset(["mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "mv", "addmv", "dot"])
FLEX = frozenset(["flex attention", "flex attention's backward"])
"""Kernels of the stand-in that take the place of flex attention; each counts as causal."""
KINDS: dict[str, tuple[str, ...]] = {
    "grouped GEMM": ("_grouped_mm",),
    "flex attention": tuple(sorted(FLEX)),
    "fused AdamW": ("_fused_adamw_", "_fused_adam_"),
    "concatenations": ("cat", "stack", "_chunk_cat"),
    "copies": (
        "clone",
        "fill_",
        "zero_",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "scalar_tensor",
        "full_like",
        "new_full",
        "eye",
        "arange",
        "constant_pad_nd",
        "repeat",
        "roll",
        "flip",
        "tril",
        "triu",
        "tril_",
        "triu_",
        "split_with_sizes_copy",
        "slice_backward",
        "select_backward",
        "_foreach_copy_",
        "_foreach_zero_",
    ),
    "reductions": (
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "any",
        "all",
        "aminmax",
        "argmax",
        "argmin",
        "count_nonzero",
        "cumsum",
        "logsumexp",
        "linalg_vector_norm",
        "norm",
        "_foreach_norm",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "segment_reduce",
        "flex attention's delta",
        "isfinite",
        "trace",
    ),
    "indexing": (
        *GATHERS,
        *SCATTERS,
        "topk",
        "sort",
        "argsort",
        "searchsorted",
        "bucketize",
        "bincount",
        "nonzero",
        "masked",
        "masked_select",
        "scatter_reduce",
        "scatter_add",
        "index_add",
        "embedding_dense_backward",
        "gather_backward",
    ),
    "factorizations": ("linalg_cholesky_ex", "linalg_solve_triangular", "linalg_inv_ex"),
    "factorizations one by one": tuple(sorted(ONE_BY_ONE)),
    "transfers with the host": ("copy to the host",),
    "exchanges": (
        "alltoall_base_",
        "alltoall_",
        "allgather_",
        "_allgather_base_",
        "allreduce_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "send",
        "recv_",
        "broadcast_",
    ),
    "elementwise": (
        "_fused_sgd_",
        "add",
        "add_",
        "sub",
        "sub_",
        "rsub",
        "mul",
        "mul_",
        "div",
        "div_",
        "neg",
        "neg_",
        "abs",
        "abs_",
        "sign",
        "sgn",
        "exp",
        "exp2",
        "exp_",
        "log",
        "log1p",
        "logaddexp",
        "pow",
        "pow_",
        "sqrt",
        "sqrt_",
        "rsqrt",
        "rsqrt_",
        "reciprocal",
        "reciprocal_",
        "square",
        "maximum",
        "minimum",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_min_",
        "clamp_max",
        "where",
        "masked_fill",
        "masked_fill_",
        "lerp",
        "lerp_",
        "addcmul",
        "addcmul_",
        "addcdiv",
        "addcdiv_",
        "sigmoid",
        "sigmoid_backward",
        "silu",
        "silu_backward",
        "softplus",
        "tanh",
        "cos",
        "sin",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "bitwise_and_",
        "bitwise_or_",
        "isnan",
        "isinf",
        "nan_to_num",
        "remainder",
        "floor_divide",
        "ldexp",
        "frexp",
    ),
}
"""The names of torch's operations, and of launches of the stand-in, by kind. Products, attention
and copies depend on more than their name."""
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
TRITON: dict[str, str] = {
    "block_scaled": "casts",
    "block_scaled._multiply": "FP8 grouped GEMM",
    "gather": "rows moved",
    "combine": "rows moved",
    "swiglu": "gates",
    "rms_norm": "norms, rotary, routes",
    "residual_sum": "elementwise",
    "attention_slices": "elementwise",
    "sum_in_order": "elementwise",
    "rotary": "norms, rotary, routes",
    "route": "norms, rotary, routes",
    "exchange_plan": "norms, rotary, routes",
    "cross_entropy": "loss kernels",
    "linear_cross_entropy": "loss kernels",
    "adam_in_basis": "optimizer kernels",
    "momentum": "optimizer kernels",
    "narrow_updates": "optimizer kernels",
    "narrow_weights": "optimizer kernels",
    "unit_norm": "optimizer kernels",
    "symmetric_product": "symmetric products",
    "grouped_weight_gradient": "experts' weight gradients",
    "quantized": "optimizer kernels",
    "remainder": "optimizer kernels",
    "split_parts": "optimizer kernels",
    "stochastic_rounding": "optimizer kernels",
    "triangle": "optimizer kernels",
}
"""The kind of Triton kernels, by folder of `lather.kernels`, or by folder and function."""


def _flops_of_grouped(tensors: Mapping[str, Tensor]) -> int:
    """Return the flops of a product for each expert over its rows."""
    return 2 * len(tensors["grad_ptr"]) * int(math.prod(tensors["out_ptr"].shape[1:]))


def _flops_of_scaled(tensors: Mapping[str, Tensor]) -> int:
    """Return the flops of the product of each row with its expert's matrix."""
    return 2 * len(tensors["out_ptr"]) * int(math.prod(tensors["weight_ptr"].shape[1:]))


TRITON_FLOPS: dict[str, Callable[[Mapping[str, Tensor]], int]] = {
    "symmetric_product._product": lambda tensors: num_flops(tensors["x_ptr"]),
    "block_scaled._multiply": _flops_of_scaled,
    "grouped_weight_gradient._add_products": _flops_of_grouped,
}
"""Functions that return the flops of a launch from its tensors, by folder and function, for the
Triton kernels that have products."""


def kind_of(
    name: str, inputs: Sequence[Tensor], made: Sequence[Tensor], *, causal: bool = True
) -> str:
    """Return the kind of one of torch's operations, by its name, inputs and results; `causal`: see
    `is_causal`."""
    if name in PRODUCTS:
        return _kind_of_product(inputs[name in SUMMED_PRODUCTS].dtype)
    if name.startswith(ATTENTION) and "efficient" not in name:
        direction = "backward" if name.endswith("_backward") else "forward"
        return f"attention {direction}" if causal else f"attention {direction}, no mask"
    if name in COPIES:
        tensors = [*inputs, *made]
        if any(x.device.type == "cpu" and x.dim() for x in tensors):
            return TRANSFERS
        return "casts" if len({x.dtype for x in tensors}) > 1 else "copies"
    if name.startswith("_foreach_"):
        return KIND_OF.get(name, "elementwise")
    return KIND_OF.get(name, UNKNOWN)


def _kind_of_product(dtype: torch.dtype) -> str:
    if dtype.itemsize == 2:
        return "GEMM"
    is_tf32 = dtype == torch.float32 and get_fp32_precision("cuda", "matmul") == "tf32"
    return "TF32 GEMM" if is_tf32 else "fp32 GEMM"


def is_causal(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation of torch is causal attention, of which a GPU computes half."""
    if not name.startswith(ATTENTION):
        return False
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    return bool((named | dict(kwargs)).get("is_causal"))


def triton_name(function: Callable[..., Any]) -> str:
    """Return folder and function of a Triton kernel."""
    return f"{function.__module__.split('.')[-2]}.{function.__name__}"


def kind_of_triton(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return the kind of a Triton kernel with these arguments; unknown, if it has products whose
    flops nobody counts."""
    name = triton_name(function)
    if "tl.dot" in source_of(function) and name not in TRITON_FLOPS:
        return UNKNOWN
    kind = TRITON.get(name) or TRITON.get(name.partition(".")[0], UNKNOWN)
    if kind == "symmetric products" and arguments["x_ptr"].dtype == torch.float32:
        return "symmetric TF32 products"
    is_turned = kind == "FP8 grouped GEMM" and arguments["TRANSPOSED"]
    return f"{kind}, transposed" if is_turned else kind


def flops_of_triton(function: Callable[..., Any], tensors: Mapping[str, Tensor]) -> int:
    """Return the flops of a launch of a Triton kernel; 0 for kernels without products."""
    count = TRITON_FLOPS.get(triton_name(function))
    return count(tensors) if count else 0
