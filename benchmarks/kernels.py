"""Measures every operation of `lather.kernels`: first its error against the torch reference, then
its rate as a share of the device's.

    check   at small sizes the operation on the device gives the reference's result on the CPU, from
            the same numbers
    rate    at DeepSeek-V2-Lite's sizes and 8,192 tokens: bytes that have to be read and written,
            per second, as a share of a device copy's; for products flops per second, as a share of
            a matrix product's (`linear_cross_entropy`: four products of T x V x D)

Letters: T tokens, K experts per token, E experts, D hidden size, F expert intermediate size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import CheckError
from benchmarks.gpu.clock import DeviceRates, measure_rates, milliseconds
from benchmarks.gpu.work import Settings
from benchmarks.report import Row
from lather.kernels import combine, gather, route, swiglu
from lather.kernels.adam_in_basis import adam_in_basis
from lather.kernels.backend import use_triton
from lather.kernels.grouped_weight_gradient import outer_product_sums
from lather.kernels.linear_cross_entropy import linear_cross_entropy
from lather.kernels.momentum import nesterov_, unit_nesterov_
from lather.kernels.narrow_updates import change_by_
from lather.kernels.narrow_weights import change_
from lather.kernels.quantized import dequantize, num_blocks, quantize_
from lather.kernels.rms_norm import rms_norm
from lather.kernels.rotary import join_shared_key, rotate_pairs, rotate_part
from lather.kernels.split_parts import split_parts
from lather.kernels.stochastic_rounding import round_to_bf16
from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU
from lather.kernels.symmetric_product import add_symmetric_product
from lather.kernels.triangle import (
    dequantize_triangle,
    pack_triangle,
    quantize_triangle,
    triangle_numel,
    unpack_triangle,
)
from lather.kernels.unit_norm import unit_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""The largest difference of a result from the reference's, relative in the Frobenius norm."""


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of a layer and of the loss."""

    t: int
    k: int
    e: int
    d: int
    f: int
    v: int
    elements: int
    """Elements of the batch of matrices that the optimizer's operation works on."""


REAL = KernelSizes(t=8192, k=6, e=64, d=2048, f=1408, v=102400, elements=2**27)
CHECKED = KernelSizes(t=500, k=3, e=16, d=260, f=200, v=3001, elements=50001)


@dataclass(frozen=True)
class KernelCase:
    """An operation with its arguments."""

    name: str
    run: Callable[[], Any]
    """Runs the operation; returns a tensor, or several. It may overwrite arguments, which it then
    returns, too."""
    amount: int
    """The bytes or flops of a run."""
    unit: str = "bytes"
    dtype: torch.dtype = torch.bfloat16


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Measure each operation; yields a row for each that is right, and then raises CheckError if
    others are not."""
    device, cpu = settings.device, torch.device("cpu")
    rates = measure_rates(device, small=settings.small)
    errors = {
        name: _error(draw(CHECKED, device), draw(CHECKED, cpu)) for name, draw in CASES.items()
    }
    wrong = {name: error for name, (error, limit) in errors.items() if not error <= limit}
    for name, draw in CASES.items():
        if name not in wrong:
            sizes = CHECKED if settings.small else REAL
            yield _row(draw(sizes, device), sizes, settings, rates, errors[name][0])
    if wrong:
        raise CheckError(f"differ from the reference by more than is allowed: {wrong}")


def _row(
    case: KernelCase, sizes: KernelSizes, settings: Settings, rates: DeviceRates, error: float
) -> Row:
    ms = milliseconds(case.run, settings.device, 5 if settings.small else 10, in_a_row=10)
    rate = 1e3 * case.amount / ms["median"]
    return {
        "benchmark": "kernel",
        "config": {
            "kernel": case.name,
            "dtype": str(case.dtype)[6:],
            "device": settings.device.type,
            **asdict(sizes),
        },
        "baseline": "device copy" if case.unit == "bytes" else "matrix product",
        "check": {"error": error},
        "ms": ms,
        case.unit: case.amount,
        f"{case.unit}_per_second": rate,
        "share": rate / (rates.bytes if case.unit == "bytes" else rates.flops),
        "rates": asdict(rates),
    }


def _error(case: KernelCase, reference: KernelCase) -> tuple[float, float]:
    """Return the largest difference from the reference, and the largest that is allowed."""
    differences = [0.0]
    for ours, theirs in zip(_tensors(case.run()), _tensors(reference.run()), strict=True):
        expected = theirs.double()
        differences.append(
            float(torch.dist(ours.double().cpu(), expected) / expected.norm().clamp(min=1e-20))
        )
    return max(differences), TOLERANCE[case.dtype]


def _tensors(results: Any) -> list[Tensor]:
    outputs = results if isinstance(results, tuple | list) else (results,)
    return [output.detach() for output in outputs if output is not None]


class _Draw:
    """Draws an operation's arguments: on the CPU for a check, so that both devices have the same;
    large ones on the device that uses them."""

    def __init__(self, sizes: KernelSizes, device: torch.device) -> None:
        self._drawn_on = torch.device("cpu") if sizes == CHECKED else device
        self.device, self._generator = device, torch.Generator(self._drawn_on).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._drawn_on).to(
            self.device, dtype
        )

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, device=self._drawn_on).to(self.device)

    def labels(self, t: int, v: int) -> Tensor:
        return torch.randint(v, (t,), generator=self._generator, device=self._drawn_on).to(
            self.device
        )

    def experts(self, sizes: KernelSizes) -> Tensor:
        return self.uniform(sizes.t, sizes.e).topk(sizes.k).indices


def _gate_forward(s: KernelSizes, device: torch.device) -> KernelCase:
    gate_up = _Draw(s, device).normal(s.t * s.k, 2 * s.f)
    return KernelCase(
        "swiglu forward", lambda: swiglu.gate_forward(gate_up, SWIGLU), 2 * s.t * s.k * 3 * s.f
    )


def _gate_gradient(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    gate_up, grad = draw.normal(s.t * s.k, 2 * s.f), draw.normal(s.t * s.k, s.f)
    return KernelCase(
        "swiglu gradient",
        lambda: swiglu.gate_gradient(grad, gate_up, SWIGLU),
        2 * s.t * s.k * 5 * s.f,
    )


def _gate_backward(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    gate_up, grad, scale = (
        draw.normal(s.t * s.k, 2 * s.f),
        draw.normal(s.t * s.k, s.f),
        draw.uniform(s.t * s.k),
    )
    name = "clamped swiglu backward, scaled"
    return KernelCase(
        name,
        lambda: swiglu.gate_backward(grad, gate_up, CLAMPED_SWIGLU, scale),
        2 * s.t * s.k * 6 * s.f,
    )


def _rms_norm(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    x_TD, grad_TD = draw.normal(s.t, s.d).requires_grad_(), draw.normal(s.t, s.d)
    weight_D = draw.uniform(s.d).bfloat16().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y_TD = rms_norm(x_TD, weight_D, 1e-6)
        return y_TD, *torch.autograd.grad(y_TD, (x_TD, weight_D), grad_TD)

    return KernelCase("rms_norm (forward and backward)", run, 2 * s.t * s.d * 5)


def _rotary(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    heads, angles = draw.normal(1, s.t, s.d // 128, 192)[..., 128:], 6 * draw.uniform(1, s.t, 32)
    cos, sin = angles.cos(), angles.sin()
    return KernelCase("rotary", lambda: rotate_pairs(heads, cos, sin), 2 * 2 * heads.numel())


def _latent_heads(s: KernelSizes, device: torch.device) -> KernelCase:
    """Make the case of queries and keys of latent attention, which are rotated in a part; of eight
    sequences, because one takes the host longer than the device."""
    draw, b, heads = _Draw(s, device), 8, s.d // 128
    query, kv = (draw.normal(b, s.t, heads, width).requires_grad_() for width in (192, 256))
    shared, angles = draw.normal(b, s.t, 64).requires_grad_(), 6 * draw.uniform(1, s.t, 32)
    tables = angles.cos(), angles.sin()
    grads = tuple(draw.normal(b, s.t, heads, width) for width in (192, 192, 128))

    def run() -> tuple[Tensor, ...]:
        q = rotate_part(query, *tables, halves=False, last=True)
        k, v = join_shared_key(kv, shared, *tables, halves=False, size=128)
        return q, k, *torch.autograd.grad((q, k, v), (query, kv, shared), grads)

    columns = 4 * 192 + (128 + 192) + (192 + 128 + 256)
    name = "heads of latent attention (forward and backward)"
    return KernelCase(name, run, 2 * b * s.t * heads * columns)


def _gather(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    routed, x = route.plan_route(draw.experts(s), s.e), draw.normal(s.t, s.d)
    return KernelCase(
        "gather",
        lambda: gather.padded_index_gather(x, routed.token_G, 1, checked=False),
        2 * s.t * s.d * (1 + s.k),
    )


def _add_rows(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    routed, grad = route.plan_route(draw.experts(s), s.e), draw.normal(s.t * s.k, s.d)
    return KernelCase(
        "gather adjoint, any index",
        lambda: gather.add_rows(grad, routed.token_G, s.t),
        2 * s.t * s.d * (1 + s.k),
    )


def _outer_product_sums(s: KernelSizes, device: torch.device) -> KernelCase:
    """Make the case of the gradient of gate and up of a later micro-batch, whose rows of tokens are
    gathered first."""
    draw = _Draw(s, device)
    routed = route.plan_route(draw.experts(s), s.e, 8)
    grad, x = draw.normal(len(routed.token_G), 2 * s.f), draw.normal(s.t, s.d)
    total = draw.normal(s.e, 2 * s.f, s.d, dtype=torch.float32)

    def run() -> Tensor:
        rows = gather.padded_index_gather(x, routed.token_G, 1, checked=False)
        return outer_product_sums(grad, rows, routed.end_E, total)

    flops = 2 * s.t * s.k * 2 * s.f * s.d
    return KernelCase("outer_product_sums", run, flops, "flops", dtype=torch.float32)


def _rows_sum(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    routed, rows_GD = route.plan_route(draw.experts(s), s.e), draw.normal(s.t * s.k, s.d)
    return KernelCase(
        "gather adjoint, known rows",
        lambda: combine.combine_forward(rows_GD, routed.row_TK),
        2 * s.t * s.d * (1 + s.k),
    )


def _combine_forward(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    routed, rows_GD, weights = (
        route.plan_route(draw.experts(s), s.e),
        draw.normal(s.t * s.k, s.d),
        draw.uniform(s.t, s.k),
    )
    return KernelCase(
        "combine forward",
        lambda: combine.combine_forward(rows_GD, routed.row_TK, weights),
        2 * s.t * s.d * (1 + s.k),
    )


def _route(s: KernelSizes, device: torch.device) -> KernelCase:
    experts_TK = _Draw(s, device).experts(s)

    def run() -> tuple[Tensor, ...]:
        routed = route.plan_route(experts_TK, s.e)
        return routed.token_G, routed.row_TK, routed.end_E

    return KernelCase("route", run, 3 * 8 * s.t * s.k, dtype=torch.float32)


def _adam(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    g, m, v = (draw.normal(s.elements, dtype=torch.float32) for _ in range(3))
    v = v.square_()
    run = lambda: (adam_in_basis(g, m, v, 3, betas=(0.9, 0.95), eps=1e-8), m, v)  # noqa: E731
    return KernelCase("adam_in_basis", run, 6 * g.nbytes, dtype=torch.float32)


def _quantized(s: KernelSizes, device: torch.device) -> KernelCase:
    x = _Draw(s, device).normal(s.elements // s.d, s.d, dtype=torch.float32)
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(len(x), num_blocks(s.d))

    def run() -> tuple[Tensor, ...]:
        quantize_(x, codes, scales, 3)
        return codes, scales, dequantize(codes, scales)

    return KernelCase("quantize_ and dequantize", run, 10 * x.numel(), dtype=torch.float32)


def _split_parts(s: KernelSizes, device: torch.device) -> KernelCase:
    x = _Draw(s, device).normal(s.elements // s.d**2 + 1, s.d, s.d, dtype=torch.float32)
    hi, mid = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))

    def run() -> tuple[Tensor, ...]:
        split_parts(x, hi, mid)
        return hi, mid

    return KernelCase("split_parts", run, 8 * x.numel())


def _stochastic_rounding(s: KernelSizes, device: torch.device) -> KernelCase:
    x = _Draw(s, device).normal(s.elements, dtype=torch.float32)
    return KernelCase("round_to_bf16", lambda: round_to_bf16(x, 3), 6 * x.numel())


def _symmetric_product(s: KernelSizes, device: torch.device) -> KernelCase:
    """Make the case of b A + c A A^T; its flops are those of the whole product."""
    n = 2 * s.d
    a = _Draw(s, device).normal(s.e, n, n)
    a = (a + a.mT) / n
    run = lambda: add_symmetric_product(a, a, beta=-4.775, alpha=2.0315)  # noqa: E731
    return KernelCase("add_symmetric_product", run, 2 * s.e * n**3, "flops")


def _muon(s: KernelSizes, device: torch.device) -> KernelCase:
    """Make the case of what Muon does to gradients before Newton-Schulz."""
    draw, shape = _Draw(s, device), (s.elements // s.d**2 + 1, s.d, s.d)
    g, b = (draw.normal(*shape, dtype=torch.float32) for _ in range(2))
    run = lambda: (unit_nesterov_(b, g, 0.95, torch.bfloat16), b)  # noqa: E731
    return KernelCase("unit_nesterov_", run, 22 * g.numel())


def _nesterov(s: KernelSizes, device: torch.device) -> KernelCase:
    """Make the case of momentum that is preconditioned before it is divided by its norm."""
    draw, shape = _Draw(s, device), (s.elements // s.d**2 + 1, s.d, s.d)
    g, b = (draw.normal(*shape, dtype=torch.float32) for _ in range(2))
    run = lambda: (unit_norm(nesterov_(b, g, 0.95), torch.bfloat16), b)  # noqa: E731
    return KernelCase("nesterov_ and unit_norm", run, 26 * g.numel())


def _narrow_updates(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    w, u = draw.normal(s.elements, dtype=torch.float32), draw.normal(s.elements)

    def run() -> Tensor:
        change_by_(w, u, 1e-4, 1e-2)
        return w

    return KernelCase("change_by_ bf16 updates", run, 10 * w.numel(), dtype=torch.float32)


def _narrow_weights(s: KernelSizes, device: torch.device) -> KernelCase:
    draw = _Draw(s, device)
    w, u = draw.normal(s.elements), draw.normal(s.elements, dtype=torch.float32)
    r = torch.zeros_like(w, dtype=torch.int16)

    def run() -> Tensor:
        change_(w, u, r, decay=1e-4, lr=1e-2, step=3)
        return w

    return KernelCase("change_ of bf16 weights with remainders", run, 12 * w.numel())


def _triangle(s: KernelSizes, device: torch.device) -> KernelCase:
    x = _Draw(s, device).normal(s.e, s.d, s.d, dtype=torch.float32)
    x = x + x.mT

    def run() -> Tensor:
        return unpack_triangle(pack_triangle(x), s.d)

    return KernelCase("pack_triangle and unpack_triangle", run, 3 * x.nbytes, dtype=torch.float32)


def _triangle_in_16_bits(s: KernelSizes, device: torch.device) -> KernelCase:
    x = _Draw(s, device).normal(s.e, s.d, s.d, dtype=torch.float32)
    x = x @ x.mT
    codes = torch.empty(s.e, triangle_numel(s.d), dtype=torch.int16, device=device)
    diagonal = torch.empty(s.e, s.d, device=device)

    def run() -> Tensor:
        quantize_triangle(x, codes, diagonal, 3)
        return dequantize_triangle(codes, diagonal)

    name = "quantize_triangle and dequantize_triangle"
    return KernelCase(name, run, 2 * x.nbytes + 2 * codes.nbytes, dtype=torch.float32)


def _cross_entropy(s: KernelSizes, device: torch.device) -> KernelCase:
    """Make the case of the loss on the logits of half of the tokens, which it overwrites with their
    gradient."""
    draw, t = _Draw(s, device), s.t // 2
    logits_TV, labels_T, scale = (
        draw.normal(t, s.v),
        draw.labels(t, s.v),
        torch.ones((), device=device),
    )
    if use_triton(logits_TV):
        from lather.kernels.cross_entropy import triton as operation
    else:
        from lather.kernels.cross_entropy import reference as operation  # type: ignore[no-redef]

    def run() -> tuple[Tensor, Tensor]:
        return operation.token_losses(logits_TV, labels_T, scale, z_loss=0.0), logits_TV

    return KernelCase("cross_entropy_ (loss and gradient)", run, 3 * logits_TV.nbytes)


def _linear_cross_entropy(s: KernelSizes, device: torch.device) -> KernelCase:
    draw, t = _Draw(s, device), s.t // 2
    x_TD, weight_VD = (
        draw.normal(t, s.d).requires_grad_(),
        draw.normal(s.v, s.d).mul_(0.02).requires_grad_(),
    )
    labels_T = draw.labels(t, s.v)

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x_TD, weight_VD, labels_T, normalizer=float(t))
        return loss, *torch.autograd.grad(loss, (x_TD, weight_VD))

    return KernelCase("linear_cross_entropy (loss and gradients)", run, 8 * t * s.v * s.d, "flops")


CASES: dict[str, Callable[[KernelSizes, torch.device], KernelCase]] = {
    draw.__name__[1:]: draw
    for draw in (
        _gate_forward,
        _gate_gradient,
        _gate_backward,
        _rms_norm,
        _rotary,
        _latent_heads,
        _gather,
        _add_rows,
        _outer_product_sums,
        _rows_sum,
        _combine_forward,
        _route,
        _adam,
        _muon,
        _nesterov,
        _narrow_updates,
        _narrow_weights,
        _quantized,
        _split_parts,
        _stochastic_rounding,
        _symmetric_product,
        _triangle,
        _triangle_in_16_bits,
        _cross_entropy,
        _linear_cross_entropy,
    )
}
"""The function that makes each operation's arguments, for given sizes and device."""
