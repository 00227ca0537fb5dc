"""Lists calls of every Triton kernel's wrapper at the sizes of real models, for
`benchmarks.ahead_of_time`.

A new kernel needs a line here, or a test says so. Each function below belongs to a folder of
`lather.kernels` and yields one line for each way to call its wrappers:

    yield gate_forward, s.rows(2 * s.f), s.gate

These are the wrapper and its arguments; options go last, in a dict. Tensors are on `meta`: they
have a shape and a dtype, and no memory. A function for another folder takes the same argument and
joins `CASES`.

Letters: T tokens, K experts per token, E experts, G rows of experts, D hidden size, F expert
intermediate size, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lather.kernels.block_scaled import BLOCK, DTYPE, BlockScaled
from lather.kernels.linear_cross_entropy import gpu_tile
from lather.kernels.route.reference import rows_for
from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU
from lather.kernels.swiglu.reference import Gate


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model's layers, in one dtype."""

    model: str
    dtype: torch.dtype
    k: int
    e: int
    d: int
    f: int
    v: int
    gate: Gate = SWIGLU
    t: int = 8192

    @property
    def g(self) -> int:
        return rows_for(_integers(self.t, self.k), self.e, alignment=8)

    def rows(self, num_columns: int) -> torch.Tensor:
        """Make a tensor (G, num_columns), the shape that experts take and return."""
        return _on_meta(self.g, num_columns, dtype=self.dtype)

    def tokens(self, num_columns: int) -> torch.Tensor:
        return _on_meta(self.t, num_columns, dtype=self.dtype)


MODELS: dict[str, Callable[[torch.dtype], ModelSizes]] = {
    "DeepSeek-V2-Lite": lambda dtype: ModelSizes(
        "DeepSeek-V2-Lite", dtype, k=6, e=64, d=2048, f=1408, v=102400
    ),
    "Qwen3-30B-A3B": lambda dtype: ModelSizes(
        "Qwen3-30B-A3B", dtype, k=8, e=128, d=2048, f=768, v=151936
    ),
    "GPT-OSS-20B": lambda dtype: ModelSizes(
        "GPT-OSS-20B", dtype, k=4, e=32, d=2880, f=2880, v=201088, gate=CLAMPED_SWIGLU
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Calls = Iterator[tuple[Any, ...]]
_on_meta = partial(torch.empty, device="meta")
_floats = partial(_on_meta, dtype=torch.float32)
_integers = partial(_on_meta, dtype=torch.int64)


def _scaled(*shape: int) -> BlockScaled:
    """Return rows or weights in FP8."""
    scaled_dims = 1 if len(shape) == 2 else 2
    scales = [-(-size // BLOCK) for size in shape[-scaled_dims:]]
    return BlockScaled(_on_meta(*shape, dtype=DTYPE), _floats(*shape[:-scaled_dims], *scales))


def _adam_in_basis(s: ModelSizes) -> Calls:
    from lather.kernels.adam_in_basis.triton import adam_in_basis

    options = {"betas": (0.95, 0.95), "eps": 1e-8, "correct_bias": True, "nesterov": False}
    for shape in ((s.e, 2 * s.f, s.d), (s.e, s.f, s.d)):
        moments = _on_meta(shape, dtype=s.dtype)
        yield adam_in_basis, _floats(shape), moments, moments, 3, options
        per_matrix = {**options, "eps": _floats(shape[:1])}
        yield adam_in_basis, _floats(shape), moments, moments, 3, per_matrix


def _attention_slices(s: ModelSizes) -> Calls:
    from lather.kernels.attention_slices import KeyGradients
    from lather.kernels.attention_slices.triton import merge_into, write_key_gradients

    half, early, late = s.t // 2, s.t, 7 * s.t
    # query heads, key-value heads, and the widths of keys and of values: grouped and latent
    for heads, groups, widths in ((32, 4, (128, 128)), (16, 16, (192, 128))):
        y_BLHU = _on_meta(1, half, heads, widths[1], dtype=s.dtype)
        lse_BHL = _floats(1, heads, half)
        yield merge_into, y_BLHU, lse_BHL, y_BLHU.clone(), lse_BHL.clone()
        for first in (early, None):
            rows = [
                [
                    None if length is None else _on_meta(1, length, groups * width, dtype=s.dtype)
                    for length in (8 * s.t, s.t, late, first)
                ]
                for width in widths
            ]
            parts = [KeyGradients(*tensors) for _, *tensors in rows]  # type: ignore[arg-type]
            starts = (0 if first is None else early, late)
            totals = [total for total, *_ in rows]
            yield write_key_gradients, totals, parts, starts, slice(0, 8 * s.t)


def _block_scaled(s: ModelSizes) -> Calls:
    from lather.kernels.block_scaled.triton import (
        grouped_product,
        scale_rows,
        scale_weights,
        unscale_rows,
    )

    end_E, row_G = _on_meta(s.e, dtype=torch.int32), _integers(s.g)
    yield unscale_rows, *_scaled(s.t, s.d), row_G, s.rows(s.d)
    yield unscale_rows, *_scaled(s.t, s.d), None, s.tokens(s.d)
    for o, i in ((2 * s.f, s.d), (s.d, s.f)):
        weights = _scaled(s.e, o, i)
        yield scale_weights, _on_meta(s.e, o, i, dtype=s.dtype), *weights
        yield scale_rows, s.rows(i), *_scaled(s.g, i)
        for row in (row_G, None):
            rows = (_scaled(s.g if row is None else s.t, size) for size in (i, o))
            for scaled, size in zip(rows, (o, i), strict=True):
                products = *weights, end_E, s.rows(size), size == i
                yield grouped_product, *scaled, row, *products


def _combine(s: ModelSizes) -> Calls:
    from lather.kernels.combine.triton import combine_forward

    row_TK, weights_TK = _integers(s.t, s.k), _floats(s.t, s.k)
    yield combine_forward, s.rows(s.d), row_TK, weights_TK
    yield combine_forward, s.rows(s.d), row_TK


def _cross_entropy(s: ModelSizes) -> Calls:
    from lather.kernels.cross_entropy.triton import token_losses

    yield token_losses, s.tokens(s.v), _integers(s.t), {"z_loss": 1e-4}
    yield token_losses, s.tokens(s.v), _integers(s.t), _floats(()), {"z_loss": 1e-4}


def _exchange_plan(s: ModelSizes) -> Calls:
    from lather.kernels.exchange_plan.triton import (
        pack_routing,
        plan_rows,
        slots_from_sent,
        unpack_routing,
    )

    experts_TK, row_TK = _integers(s.t, s.k), _on_meta(s.t, s.k, dtype=torch.int32)
    for num_ranks in (8, 32):
        yield plan_rows, experts_TK, s.e // num_ranks, num_ranks, num_ranks == 32
    token_S, weights_TK = _on_meta(s.t * s.k // 2, dtype=torch.int32), _floats(s.t, s.k)
    yield pack_routing, experts_TK, weights_TK, token_S, row_TK, s.e // 8
    yield unpack_routing, _on_meta(s.t, 2 * s.k, dtype=torch.int32), torch.float32
    yield slots_from_sent, weights_TK, row_TK


def _gather(s: ModelSizes) -> Calls:
    from lather.kernels.gather.triton import add_rows, gather_rows

    yield gather_rows, s.tokens(s.d), _integers(s.g)
    yield gather_rows, s.tokens(s.d), _on_meta(s.g, dtype=torch.int32)
    rows = _scaled(s.t, s.d)
    for x in (rows.values.view(torch.uint8), rows.scales):
        yield gather_rows, x, _on_meta(s.g, dtype=torch.int32)
    yield add_rows, s.rows(s.d), _integers(s.g), s.t


def _grouped_weight_gradient(s: ModelSizes) -> Calls:
    from lather.kernels.grouped_weight_gradient.triton import outer_product_sums

    end_E = _on_meta(s.e, dtype=torch.int32)
    # pointers read rows of the last widths
    for o, i in ((2 * s.f, s.d), (s.d, s.f), (s.d - 1, s.f - 1)):
        for accumulate in (False, True):
            out = _floats(s.e, o, i)
            yield outer_product_sums, s.rows(o), s.rows(i), end_E, out, accumulate


def _linear_cross_entropy(s: ModelSizes) -> Calls:
    from lather.kernels.linear_cross_entropy.triton import softmax_gradient, update_logsumexp_

    num_tokens, width = gpu_tile(s.t)
    for num_columns in (width, s.v % width or width):
        tile, labels = _floats(num_tokens, num_columns), _integers(num_tokens)
        yield (
            update_logsumexp_,
            _floats(num_tokens),
            _floats(num_tokens),
            _floats(num_tokens),
            tile,
            labels,
            width,
        )
        yield (
            softmax_gradient,
            tile,
            labels,
            width,
            _floats(num_tokens),
            _floats(num_tokens),
            {"z_loss": 1e-4, "dtype": s.dtype},
        )


def _momentum(s: ModelSizes) -> Calls:
    from lather.kernels.momentum.triton import nesterov_, unit_nesterov_

    x = _floats(s.e, 2 * s.f, s.d)
    yield nesterov_, x, x, 0.95
    for dtype in (torch.bfloat16, torch.float32):
        yield unit_nesterov_, x, x, 0.95, dtype


def _narrow_updates(s: ModelSizes) -> Calls:
    from lather.kernels.narrow_updates.triton import change_by_

    shape = (s.e, 2 * s.f, s.d)
    yield change_by_, _floats(*shape), _on_meta(*shape, dtype=torch.bfloat16), 1e-4, 1e-2


def _narrow_weights(s: ModelSizes) -> Calls:
    from lather.kernels.narrow_weights.triton import change_

    shape = (s.e, 2 * s.f, s.d)
    w, r = _on_meta(shape, dtype=torch.bfloat16), _on_meta(shape, dtype=torch.int16)
    for remainder in (None, r):
        yield change_, w, _floats(shape), remainder, {"decay": 1e-4, "lr": 1e-2, "step": 3}


def _quantized(s: ModelSizes) -> Calls:
    from lather.kernels.quantized import BASIS, POSITIVE, SIGNED, num_blocks
    from lather.kernels.quantized.triton import dequantize, quantize_

    shape = (s.e, 2 * s.f, s.d)
    codes, scales = (
        _on_meta(shape, dtype=torch.int8),
        _floats(*shape[:-1], num_blocks(shape[-1])),
    )
    for code in (SIGNED, POSITIVE, BASIS):
        yield quantize_, _floats(shape), codes, scales, 3, code, code is not BASIS
        yield dequantize, codes, scales, _floats(shape), code


def _residual_sum(s: ModelSizes) -> Calls:
    from lather.kernels.residual_sum.triton import add_terms

    for shared in (s.tokens(s.d), None):
        yield add_terms, _floats(s.t, s.d), s.tokens(s.d), shared


def _rms_norm(s: ModelSizes) -> Calls:
    from lather.kernels.rms_norm.triton import (
        backward,
        backward_rounded,
        forward,
        forward_rounded,
    )

    # the widths of the hidden state, and of a head's query
    for width, copies in (
        (s.d, 1),
        (128, 16),
    ):
        x, weight, inverse_rms = (
            _on_meta(s.t * copies, width, dtype=s.dtype),
            _floats(width),
            _floats(s.t * copies, 1),
        )
        yield forward, x, weight, 1e-6
        yield backward, _floats(s.t * copies, width), x, weight, inverse_rms
        yield forward_rounded, x, None, weight, 1e-6, s.dtype, {"wide": False}  # a latent
    # the residual stream is in fp32
    narrow, wide, weight, inverse_rms = (
        s.tokens(s.d),
        _floats(s.t, s.d),
        _floats(s.d),
        _floats(s.t, 1),
    )
    rest = (wide, wide, weight, inverse_rms)
    for branch, both in ((None, False), (None, True), (narrow, False), (narrow, True)):
        yield forward_rounded, wide, branch, weight, 1e-6, s.dtype, {"wide": both}
    yield backward_rounded, [wide], *rest, None
    for grads in ([narrow], [narrow, wide], [narrow, narrow, wide]):
        yield backward_rounded, grads, *rest, s.dtype


def _rotary(s: ModelSizes) -> Calls:
    from lather.kernels.rotary.triton import join_keys, keys_gradient, turn

    # heads of latent attention, whole heads, and heads of which the first columns are rotated
    for width, rotary, halves in ((192, 64, False), (128, 128, True), (256, 64, True)):
        heads, table = (
            _on_meta(1, s.t, 16, width, dtype=s.dtype),
            _floats(1, s.t, rotary // 2),
        )
        options = {"halves": halves, "last": width == 192}
        for back in (False, True):
            yield turn, heads, table, table, {**options, "back": back}
    # DeepSeek-V2 has pairs of neighbors, DeepSeek-V3 may have halves; 128 heads need a loop
    for num_heads, halves in ((16, False), (128, True)):
        heads, values, table = (
            _on_meta(1, s.t, num_heads, 192, dtype=s.dtype),
            _on_meta(1, s.t, num_heads, 128, dtype=s.dtype),
            _floats(1, s.t, 32),
        )
        shared = _on_meta(1, s.t, 576, dtype=s.dtype)[..., 512:]
        keys = _on_meta(1, s.t, num_heads, 256, dtype=s.dtype)[..., :128]
        yield join_keys, keys, shared, table, table, {"halves": halves}
        yield keys_gradient, heads, values, table, table, {"halves": halves}


def _route(s: ModelSizes) -> Calls:
    from lather.kernels.route.triton import (
        check_range,
        plan_route,
        rows_from_slots,
        slots_from_rows,
    )

    experts_TK = _integers(s.t, s.k)
    yield plan_route, experts_TK, s.e, 1
    yield plan_route, experts_TK, s.e, 8
    yield plan_route, experts_TK, s.e // 8, 8, s.t * s.k // 8
    yield check_range, experts_TK, -1, s.e, "experts_TK"
    yield rows_from_slots, _floats(s.t, s.k), experts_TK, s.g
    yield slots_from_rows, _floats(s.g), experts_TK


def _remainder(s: ModelSizes) -> Calls:
    from lather.kernels.remainder.triton import join, split

    shape = (s.e, 2 * s.f, s.d)
    halves = _on_meta(shape, dtype=torch.bfloat16), _on_meta(shape, dtype=torch.int16)
    yield join, *halves, _floats(shape)
    yield split, _floats(shape), *halves


def _split_parts(s: ModelSizes) -> Calls:
    from lather.kernels.split_parts.triton import split_parts

    x = _floats(2, s.d, s.d)
    hi, mid = (_on_meta(2, s.d, s.d, dtype=torch.bfloat16) for _ in range(2))
    for source, rows in ((x, slice(None)), (x.mT, slice(None)), (x[:, 256:], slice(256, None))):
        yield split_parts, source, hi[:, rows], mid[:, rows]
    half = s.d // 2
    yield split_parts, _floats(2, s.d, half), hi[:, :, :half], mid[:, :, :half]


def _stochastic_rounding(s: ModelSizes) -> Calls:
    from lather.kernels.stochastic_rounding.triton import round_to_bf16

    shape = (s.e, 2 * s.f, s.d)
    yield round_to_bf16, _floats(shape), 3, _on_meta(shape, dtype=torch.bfloat16)


def _sum_in_order(s: ModelSizes) -> Calls:
    from lather.kernels.sum_in_order.triton import sum_in_order

    yield sum_in_order, _on_meta(8, s.t * 1024, dtype=s.dtype)


def _swiglu(s: ModelSizes) -> Calls:
    from lather.kernels.swiglu.triton import gate_forward, gate_gradient, scaled_gate_forward

    yield gate_forward, s.rows(2 * s.f), s.gate
    yield scaled_gate_forward, s.rows(2 * s.f), s.gate, *_scaled(s.g, s.f)
    yield gate_gradient, s.rows(s.f), s.rows(2 * s.f), s.gate, None, s.rows(s.f)
    yield (
        gate_gradient,
        s.rows(s.f),
        s.rows(2 * s.f),
        s.gate,
        _floats(s.g),
        s.rows(s.f),
        _floats(s.g),
    )
    weighted = _floats(s.g), s.rows(s.f), _floats(s.g), _scaled(s.g, 2 * s.f)
    yield gate_gradient, s.rows(s.f), s.rows(2 * s.f), s.gate, *weighted
    yield gate_gradient, s.rows(s.f), s.rows(2 * s.f), s.gate


def _symmetric_product(s: ModelSizes) -> Calls:
    from lather.kernels.symmetric_product.triton import add_symmetric_product, symmetric_product

    x = _on_meta(s.e, s.d, s.f, dtype=s.dtype)
    for matrices in (x, x.mT) if s.dtype == torch.bfloat16 else (x,):
        yield symmetric_product, matrices
        square = _on_meta(s.e, *matrices.shape[1:2] * 2, dtype=s.dtype)
        options = {"beta": 0.95, "alpha": 0.05, "out": square}
        yield add_symmetric_product, square, matrices, options


def _triangle(s: ModelSizes) -> Calls:
    from lather.kernels.triangle import triangle_numel
    from lather.kernels.triangle.triton import (
        dequantize_triangle,
        pack_triangle,
        quantize_triangle,
        unpack_triangle,
    )

    x, packed = _floats(s.e, s.d, s.d), _on_meta(s.e, triangle_numel(s.d), dtype=s.dtype)
    yield pack_triangle, x, packed
    yield unpack_triangle, packed, x
    codes = _on_meta(packed.shape, dtype=torch.int16), _floats(s.e, s.d)
    yield quantize_triangle, x, *codes, 3
    yield dequantize_triangle, *codes, x


def _unit_norm(s: ModelSizes) -> Calls:
    from lather.kernels.unit_norm.triton import unit_norm

    yield unit_norm, _floats(s.e, 2 * s.f, s.d), torch.bfloat16
    yield unit_norm, _floats(s.e, 2 * s.f, s.d), torch.float32


CASES: tuple[Callable[[ModelSizes], Calls], ...] = (
    _adam_in_basis,
    _attention_slices,
    _block_scaled,
    _combine,
    _cross_entropy,
    _exchange_plan,
    _gather,
    _grouped_weight_gradient,
    _linear_cross_entropy,
    _momentum,
    _narrow_updates,
    _narrow_weights,
    _quantized,
    _remainder,
    _residual_sum,
    _rms_norm,
    _rotary,
    _route,
    _split_parts,
    _stochastic_rounding,
    _sum_in_order,
    _swiglu,
    _symmetric_product,
    _triangle,
    _unit_norm,
)
