"""Tensors in 8 bits: the codes against an implementation in Python's own numbers, unbiased
averages, and extreme blocks; the Triton kernels, in the interpreter, have the bits of the
reference."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import on_each
from kernels.test_stochastic_rounding import hashed
from lather.kernels.quantized import (
    BASIS,
    BLOCK,
    POSITIVE,
    SIGNED,
    Code,
    dequantize,
    num_blocks,
    quantize_,
    reference,
)

try:
    from lather.kernels.quantized import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
CODES = pytest.mark.parametrize(
    "code", [SIGNED, POSITIVE, BASIS], ids=["signed", "positive", "basis"]
)
SHAPES = [(3, 5, 64), (63,), (7, 500), (2, 256), (1, 1), (4, 1025), (0, 4), (3, 0)]


def levels(code: Code) -> list[float]:
    """List the magnitudes of all codes in units."""
    per_octave = (128 if code.is_signed else 256) // code.octaves
    fractions = [number / per_octave for number in range(per_octave)]
    octaves = range(code.octaves - 1)
    return fractions + [2.0**octave * (1 + f) for octave in octaves for f in fractions]


def encoded_alone(block: list[float], step: int, code: Code, *, stochastic: bool) -> list[float]:
    """Encode and decode a block with loops."""
    table, largest = levels(code), max(map(abs, block))
    unit = 2.0**-126
    while largest / unit > table[-1]:
        unit *= 2
    decoded = []
    for x in block:
        y = abs(x) / unit
        y = y if y >= 1 else float(torch.tensor(1 + y, dtype=torch.float32)) - 1
        number = max(i for i, level in enumerate(table) if level <= y)
        if number < len(table) - 1:
            share = (y - table[number]) / (table[number + 1] - table[number])
            noise = hashed(x, step) >> 32 - code.shift if stochastic else 0
            number += math.floor(share + 0.5 + noise / 2**code.shift)
        if not code.is_signed:
            number = max(number, int(x != 0))
        decoded.append(math.copysign(table[number] * unit, x))
    return decoded


def stored(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.full(x.shape, 77, dtype=torch.int8)
    return codes, torch.full((*x.shape[:-1], num_blocks(x.shape[-1])), math.nan)


def restored(
    x: Tensor,
    step: int = 1,
    code: Code = SIGNED,
    *,
    stochastic: bool = True,
    implementation: ModuleType = reference,
) -> Tensor:
    """Encode and decode x."""
    codes, scales = stored(x)
    implementation.quantize_(x, codes, scales, step, code, stochastic)
    out = torch.empty_like(x)
    implementation.dequantize(codes, scales, out, code)
    return out


def drawn(shape: tuple[int, ...], code: Code, octaves: float = 20.0) -> Tensor:
    """Draw numbers whose magnitudes span so many octaves; a tenth are zero."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    x *= (-octaves * torch.rand(shape, generator=generator)).exp2()
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    return x if code.is_signed else x.abs()


@IMPLEMENTATIONS
@CODES
@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_against_loops(
    implementation: ModuleType, shape: tuple[int, ...], stochastic: bool, code: Code
) -> None:
    x = drawn(shape, code) * 1e-3
    actual = restored(x, 5, code, stochastic=stochastic, implementation=implementation)
    if x.numel():
        rows = x.reshape(-1, shape[-1]).tolist()
        expected = [
            encoded_alone(row[start : start + BLOCK], 5, code, stochastic=stochastic)
            for row in rows
            for start in range(0, len(row), BLOCK)
        ]
        assert actual.flatten().tolist() == list(itertools.chain(*expected))


@CODES
def test_what_was_decoded_is_encoded_alike(code: Code) -> None:
    once = restored(drawn((40, 300), code), 1, code)
    for step, stochastic in ((2, True), (3, False)):
        assert restored(once, step, code, stochastic=stochastic).equal(once)


def steps_between(x: Tensor, code: Code) -> Tensor:
    """Return the distances of the codes between which the elements of blocks x (B, n) lie."""
    table = torch.tensor(levels(code), dtype=torch.float64)
    codes, scales = stored(x)
    reference.quantize_(x, codes, scales, 1, code, True)
    above = torch.bucketize(x.abs().double() / scales, table, right=True).clamp(max=len(table) - 1)
    return (table[above] - table[above - 1]) * scales


@CODES
@pytest.mark.parametrize("tilt", [0.0, 0.01], ids=["ours", "tilted by 1 %"])
def test_the_expectation_over_steps_is_kept(code: Code, tilt: float) -> None:
    """The mean error of 2^19 roundings, in steps of the code, is below 5 standard deviations."""
    x = drawn((8, BLOCK), code, octaves=8)
    distance = steps_between(x, code)
    errors = [(restored(x, step, code).double() - x.double()) / distance for step in range(512)]
    table = torch.stack(errors)
    assert float(table.abs().max()) < 1
    assert (float(table.mean().abs() + tilt) < 3e-3) == (tilt == 0)
    assert float(table.mean(0).abs().max()) < 0.5 / math.sqrt(512) * 5


@pytest.mark.parametrize(
    ("beta", "stochastic"),
    [(0.95, True), (0.999, True), (0.999, False)],
    ids=["fast", "slow", "slow, to the nearest"],
)
@pytest.mark.parametrize("code", [SIGNED, POSITIVE], ids=["signed", "positive"])
def test_an_average_follows_that_in_fp32(code: Code, beta: float, stochastic: bool) -> None:
    """The elements of an exponential average that is stored after every step are those of its twin
    in fp32, in the mean to half a percent; rounded to the nearest, a slow one stalls."""
    generator = torch.Generator().manual_seed(0)
    exact, coded = (torch.zeros(64, 256) for _ in range(2))
    scale = (-5 * torch.rand(64, 256, generator=generator)).exp2()
    for step in range(round(1.5 / (1 - beta))):
        g = (torch.randn(64, 256, generator=generator) * 0.3 + 1) * scale
        g = g if code.is_signed else g.square()
        exact.lerp_(g, 1 - beta)
        coded = restored(coded.lerp_(g, 1 - beta), step, code, stochastic=stochastic)
    error = abs(float((coded.double() / exact.double()).mean()) - 1)
    assert (error < 5e-3) == stochastic


def updates(
    scale: Tensor, momentum: Code | None = None, square: Code | None = None, num_steps: int = 150
) -> Tensor:
    """Return Adam's updates by gradients of these sizes, with stored moments."""
    generator = torch.Generator().manual_seed(0)
    signal = 0.3 * torch.randn(32, 256, generator=generator)
    m, v, u = (torch.zeros(32, 256) for _ in range(3))
    for step in range(num_steps):
        g = (signal + torch.randn(32, 256, generator=generator)) * scale
        m, v = m.lerp(g, 0.05), v.lerp(g.square(), 0.05)
        u = m / v.sqrt()
        m = m if momentum is None else restored(m, step, momentum)
        v = v if square is None else restored(v, step, square)
    return u


def test_moments_that_span_decades_keep_their_direction() -> None:
    """Adam's updates of columns whose sizes fall to a 10,000th differ from those in fp32 by 9 % of
    their size at most; with a linear code for the momentum by nearly their size."""
    scale = 10.0 ** torch.linspace(0, -4, 256)
    exact = updates(scale)
    errors = {
        code: float(
            (updates(scale, code, POSITIVE) - exact)[:, -64:].norm() / exact[:, -64:].norm()
        )
        for code in (SIGNED, Code(1, is_signed=True))
    }
    assert errors[SIGNED] < 0.09
    assert errors[Code(1, is_signed=True)] > 0.8


def test_the_noise_beside_a_huge_element_is_bounded() -> None:
    """Beside a gradient that is a million times as large, Adam's updates stay below 1; with exact
    second moments they would not."""
    scale = torch.ones(256)
    scale[::100] = 1e6
    assert float(updates(scale, SIGNED, POSITIVE).abs().max()) < 1
    assert float(updates(scale, SIGNED).abs().max()) > 100


def test_bases_stay_nearly_orthonormal() -> None:
    """The error of a random basis has a spectral norm of 1.5 %; in the code of moments it would be
    nearly twice as much."""
    q = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0))).Q
    errors = {
        code: float(torch.linalg.matrix_norm(restored(q, 1, code, stochastic=False) - q, 2))
        for code in (BASIS, SIGNED)
    }
    assert errors[BASIS] < 0.016
    assert errors[SIGNED] > 0.025


@CODES
def test_extreme_blocks(code: Code) -> None:
    block = drawn((1, 256), code).squeeze(0)
    zeros = torch.zeros(256)
    huge = block.clone()
    huge[7] = 3e38
    tiny = torch.arange(256).float() * 2.0**-149
    lonely = zeros.clone()
    lonely[3] = 1e-45
    x = torch.stack((zeros, huge, tiny, lonely, block * 1e-38, block))
    out = restored(x, 1, code)
    assert out[0].equal(zeros)
    assert float(out[1, 7]) == pytest.approx(3e38, rel=2**-4)
    assert out.isfinite().all()
    assert out[5].equal(restored(block[None], 1, code)[0])
    if code is POSITIVE:
        assert ((out > 0) == (x > 0)).all()
    for bad in (math.inf, -math.inf, math.nan):
        x[1, 7] = bad
        again = restored(x, 1, code)
        assert again[1, :BLOCK].isnan().all()
        assert again[1, BLOCK:].equal(out[1, BLOCK:])
        assert again[2:].equal(out[2:])


@IMPLEMENTATIONS
@CODES
def test_blocks_that_are_not_finite_are_nan(implementation: ModuleType, code: Code) -> None:
    x = drawn((5, 300), code)
    x[1, 3], x[2, 299], x[3, 0] = math.inf, math.nan, -math.inf
    out = restored(x, 1, code, implementation=implementation)
    bad = torch.zeros(5, 300, dtype=torch.bool)
    bad[1, :BLOCK] = bad[2, 2 * BLOCK :] = bad[3, :BLOCK] = True
    assert out.isnan().equal(bad)


def test_any_strides_a_given_output_and_errors() -> None:
    x = drawn((6, 40, 30), SIGNED)
    expected = restored(x.mT.contiguous(), 3)
    codes, scales = stored(x.mT)
    codes, scales = codes.contiguous(), scales.contiguous()
    quantize_(x.mT, codes, scales, 3)
    out = torch.empty(6, 30, 40)
    assert dequantize(codes, scales, out=out) is out
    assert out.equal(expected)
    assert dequantize(codes, scales).equal(expected)
    with pytest.raises(TypeError, match=r"float32 \(convert it first\)"):
        quantize_(x.mT.double(), codes, scales, 1)
