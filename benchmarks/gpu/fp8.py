"""Measures the grouped product of experts in FP8 against peers, at the sizes of a block of
DeepSeek-V2-Lite with 8,192 tokens, evenly spread.

All contestants multiply the same rows with the same weights, each in its own format:

    grouped_mm               torch's in bf16, the baseline
    lather                   e4m3 with scales of 1 x 128 and 128 x 128, rows and weights rounded
    lather, transposed       the same product, of weights that are stored as their transposes, as in
                             the gradients of inputs
    lather with rounding     the first, and the time to round the rows
    scaled_grouped_mm        torch's: e4m3 with a scale for each row of rows and of weights
    scaled_grouped_mm, fast  the same with narrower sums
    deep_gemm                DeepGEMM's, with the operands of lather

Before it is timed, a result must be that of fp32 products of the same rounded operands, and near
the product in bf16. A peer that is not installed, or that refuses device or sizes, gives a row with
the reason, and stops nothing.

Letters: G rows grouped by expert, E experts, I input and O output size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.check import CheckError
from benchmarks.gpu.clock import milliseconds
from benchmarks.gpu.work import Settings
from benchmarks.report import Row
from lather.kernels.block_scaled import (
    BLOCK,
    DTYPE,
    grouped_product,
    multiplies_in_fp8,
    scaled_rows,
    scaled_weights,
    unscaled_rows,
)

TOLERANCE = 6e-3
"""The largest difference from the fp32 products of the same operands, relative in the Frobenius
norm; that of rounding to bf16 is 2e-3."""
NEAR = 8e-2
"""The largest difference from the product in bf16; that of rounding to e4m3 is 4e-2."""


@dataclass(frozen=True)
class ExpertProductSizes:
    """Sizes of a product."""

    output: int
    input: int
    experts: int = 64
    rows: int = 768
    """Rows of each expert."""


REAL = {"gate/up": ExpertProductSizes(2816, 2048), "down": ExpertProductSizes(2048, 1408)}
SMALL = {
    "gate/up": ExpertProductSizes(256, 200, 4, 16),
    "down": ExpertProductSizes(200, 128, 4, 16),
}


@dataclass(frozen=True)
class ExpertOperands:
    """Rows and weights of a product, in bf16."""

    x_GI: Tensor
    weight_EOI: Tensor
    end_E: Tensor


@dataclass(frozen=True)
class ExpertProduct:
    """A contestant's product, and the numbers that it multiplies."""

    run: Callable[[], Tensor]
    x_GI: Tensor
    weight_EOI: Tensor


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Measure every contestant; yields a row for each and each product. Raises CheckError for
    contestants that are no peers."""
    if not multiplies_in_fp8(settings.device):
        raise CheckError("this device does not multiply in FP8")
    sizes = SMALL if settings.small else REAL
    operands = {name: _operands(each, settings.device) for name, each in sizes.items()}
    plain: dict[str, tuple[Tensor, float]] = {}
    for name, make in CONTESTANTS.items():
        for product, given in operands.items():
            row: Row = {
                "benchmark": "fp8",
                "config": {
                    "contestant": name,
                    "product": product,
                    "device": settings.device.type,
                    **asdict(sizes[product]),
                },
                "baseline": BASELINE,
                "check": {},
            }
            try:
                row |= _measured(make(given), given, plain, product, settings)
            except Exception as error:
                if name not in PEERS:
                    raise
                row["absent"] = reason(error)
            yield row


def reason(error: Exception) -> str:
    """Say in a line why a peer was not measured."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def _measured(
    product: ExpertProduct,
    given: ExpertOperands,
    plain: dict[str, tuple[Tensor, float]],
    name: str,
    settings: Settings,
) -> Row:
    """Check a product, then time it. The baseline's result and milliseconds go into `plain`."""
    y_GO = product.run()
    error = _difference(y_GO, _exact(product, given.end_E))
    distance = _difference(y_GO, plain[name][0]) if plain.get(name) else 0.0
    if not (error <= TOLERANCE and distance <= NEAR):
        raise CheckError(
            f"{name}: differs from its fp32 product by {error:.1e}, at most {TOLERANCE:.0e} is "
            f"allowed, and from that in bf16 by {distance:.1e}, at most {NEAR:.0e}"
        )
    ms = milliseconds(product.run, settings.device, 3 if settings.small else 10, in_a_row=10)
    plain.setdefault(name, (y_GO.clone(), ms["median"]))
    flops = 2 * given.x_GI.numel() * given.weight_EOI.shape[1]
    return {
        "check": {"error": error, "difference_from_bf16": distance},
        "ms": ms,
        "times_of_bf16": ms["median"] / plain[name][1],
        "flops_per_second": 1e3 * flops / ms["median"],
    }


def _operands(sizes: ExpertProductSizes, device: torch.device) -> ExpertOperands:
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=generator)
    end_E = sizes.rows * torch.arange(1, sizes.experts + 1, dtype=torch.int32, device=device)
    weight_EOI = normal(sizes.experts, sizes.output, sizes.input).mul_(0.02)
    return ExpertOperands(normal(sizes.experts * sizes.rows, sizes.input), weight_EOI, end_E)


def _exact(product: ExpertProduct, end_E: Tensor) -> Tensor:
    """Return the product in fp32; experts have equally many rows."""
    x_ENI = product.x_GI.float().unflatten(0, (len(end_E), -1))
    return torch.cat(
        [x_NI @ w_OI.float().T for x_NI, w_OI in zip(x_ENI, product.weight_EOI, strict=True)]
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    wide = expected.float()
    return float(torch.dist(found.float(), wide) / wide.norm())


def _in_bf16(given: ExpertOperands) -> ExpertProduct:
    weight_EIO = given.weight_EOI.transpose(1, 2)
    run = partial(F.grouped_mm, given.x_GI, weight_EIO, offs=given.end_E)
    return ExpertProduct(run, given.x_GI, given.weight_EOI)


def _with_blocks(
    given: ExpertOperands, *, rounding: bool = False, transposed: bool = False
) -> ExpertProduct:
    rows = scaled_rows(given.x_GI)
    weights = scaled_weights(given.weight_EOI.mT if transposed else given.weight_EOI)

    def run() -> Tensor:
        x = scaled_rows(given.x_GI) if rounding else rows
        return grouped_product(x, None, weights, given.end_E, torch.bfloat16, transposed=transposed)

    values_EOI, scales_EOI = (part.mT if transposed else part for part in weights)
    for dim, size in enumerate(given.weight_EOI.shape[1:], start=1):
        scales_EOI = scales_EOI.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    x_GI = unscaled_rows(rows, None, torch.float32)
    return ExpertProduct(run, x_GI, values_EOI.float() * scales_EOI)


def _with_row_scales(given: ExpertOperands, *, fast: bool) -> ExpertProduct:
    functional: Any = F  # the stubs of torch 2.13 lack a name
    (x_GI, scale_G), (weight_EOI, scale_EO) = map(_by_row, (given.x_GI, given.weight_EOI))
    by_row = functional.ScalingType.RowWise
    factors = (x_GI, weight_EOI.transpose(1, 2), scale_G, by_row, scale_EO, by_row)
    run = partial(functional.scaled_grouped_mm, *factors, offs=given.end_E, use_fast_accum=fast)
    return ExpertProduct(
        run, x_GI.float() * scale_G[..., None], weight_EOI.float() * scale_EO[..., None]
    )


def _by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values, and a scale for each row."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / torch.finfo(DTYPE).max).clamp_(min=torch.finfo(wide.dtype).tiny)
    return (wide / scale[..., None]).to(DTYPE), scale


def _of_deep_gemm(given: ExpertOperands) -> ExpertProduct:
    deep_gemm = importlib.import_module("deep_gemm")
    ours = _with_blocks(given)
    rows, weights = scaled_rows(given.x_GI), scaled_weights(given.weight_EOI)
    num_experts, device = len(given.end_E), given.x_GI.device
    expert_E = torch.arange(num_experts, dtype=torch.int32, device=device)
    expert_G = expert_E.repeat_interleave(len(given.x_GI) // num_experts)
    out_GO = given.x_GI.new_empty(len(given.x_GI), given.weight_EOI.shape[1])

    def run() -> Tensor:
        multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        multiply(tuple(rows), tuple(weights), out_GO, expert_G)
        return out_GO

    return ExpertProduct(run, ours.x_GI, ours.weight_EOI)


CONTESTANTS: dict[str, Callable[[ExpertOperands], ExpertProduct]] = {
    "grouped_mm": _in_bf16,
    "lather": _with_blocks,
    "lather, transposed": partial(_with_blocks, transposed=True),
    "lather with rounding": partial(_with_blocks, rounding=True),
    "scaled_grouped_mm": partial(_with_row_scales, fast=False),
    "scaled_grouped_mm, fast": partial(_with_row_scales, fast=True),
    "deep_gemm": _of_deep_gemm,
}
"""The baseline comes first, and last the peer that compiles for longest."""
BASELINE = "grouped_mm"
PEERS = ("scaled_grouped_mm", "scaled_grouped_mm, fast", "deep_gemm")
