"""Stochastic rounding to bf16: unbiased over steps and over values, with nothing changed that bf16
has; the Triton kernel, in the interpreter, has the bits of the reference."""

from __future__ import annotations

import math
import struct
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import on_each
from lather.kernels.stochastic_rounding import reference, round_to_bf16

try:
    from lather.kernels.stochastic_rounding import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
BOUND = 4e-3
"""The largest mean error in units of the distance of neighbors in bf16, over 2^18 roundings: 5
standard deviations."""


def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def hashed(x: float, step: int) -> int:
    """Return the 32 bits of noise of a number, signed, with Python's integers; the step is hashed
    by the published lowbias32."""
    key = step % 2**32
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        key = (key ^ key >> shift) * multiplier % 2**32
    h = signed((bits_of(x) ^ key ^ key >> 16) * 0x7FEB352D)
    return signed((h ^ h >> 15) * 0x846CA68B)


def signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def rounded_alone(x: float, step: int) -> float:
    bits = bits_of(x) + 2**15 + (hashed(x, step) >> 16) >> 16 << 16
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def errors(values: Tensor, step: int, tilt: float = 0.0) -> Tensor:
    """Return rounded minus exact values, in units of the distance of their neighbors; `tilt` shifts
    all by a part of it."""
    bits = values.view(torch.int32)
    below = (bits & -0x10000).view(torch.float32).double()
    above = ((bits & -0x10000) + 0x10000).view(torch.float32).double()
    rounded = round_to_bf16(values, step).double()
    assert ((rounded == below) | (rounded == above)).all()
    return (rounded - values.double()) / (above - below).abs() + tilt


@pytest.mark.parametrize("tilt", [0.0, 0.01], ids=["ours", "tilted by 1 %"])
def test_it_is_unbiased_over_steps_and_over_values(tilt: float) -> None:
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(64, generator=generator) * 10.0 ** torch.arange(-40.0, 24)
    over_steps = torch.stack([errors(some, step, tilt) for step in range(4096)])
    neighbors = (torch.arange(2**18, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    tops = (torch.arange(2**14, dtype=torch.int32) << 16) + 0x3333
    over_values = [errors(neighbors, 7, tilt), errors(tops.view(torch.float32), 7, tilt)]
    means = [abs(float(x.mean())) for x in (over_steps, over_values[0])]
    assert (max(means) < BOUND) == (tilt == 0)
    # the mean of each value over steps, and of the same low bits below each binade
    assert float(over_steps.mean(0).abs().max()) < 0.5 / 64 * 5
    assert float(over_values[1].mean().abs()) < 0.5 / 128 * 5


def test_steps_and_neighbors_are_independent() -> None:
    """A sum of roundings of one value over steps, and of neighbors in one step, has the variance of
    a binomial distribution."""
    values = (torch.arange(4096, dtype=torch.int32) * 16 + 0x3F800000).view(torch.float32)
    table = torch.stack([errors(values, step) for step in range(1024)])
    up = (values.double() - 1) % 2**-7 * 2**7
    variance = up * (1 - up)
    over_steps = table.sum(0).square().sum() / (1024 * variance.sum())
    over_values = table.sum(1).square().mean() / variance.sum()
    assert float(over_steps) == pytest.approx(1, abs=0.15)
    assert float(over_values) == pytest.approx(1, abs=0.25)


@IMPLEMENTATIONS
@pytest.mark.parametrize("step", [0, 1, 7, 2**31, 2**33 + 5])
def test_bits_against_the_published_hash(implementation: ModuleType, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(63, generator=generator) * 10.0 ** torch.linspace(-44, 38, 63)
    out = torch.empty(63, dtype=torch.bfloat16)
    implementation.round_to_bf16(values, step, out)
    assert out.tolist() == [rounded_alone(x, step) for x in values.tolist()]


@IMPLEMENTATIONS
def test_what_bf16_has_stays(implementation: ModuleType) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty_like(every)
    for step in (1, 2):
        implementation.round_to_bf16(every.float(), step, out)
        is_nan = every.isnan()
        assert out.isnan().equal(is_nan)
        assert out[~is_nan].view(torch.int16).equal(every[~is_nan].view(torch.int16))
    low = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    out = torch.empty(3, dtype=torch.bfloat16)
    implementation.round_to_bf16(low, 3, out)
    assert out.isnan().all()


def test_any_strides_and_a_given_output() -> None:
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
    expected = round_to_bf16(x, 3)
    assert expected.dtype == torch.bfloat16
    out = torch.full((6, 4, 5, 2), math.pi, dtype=torch.bfloat16)
    result = round_to_bf16(x.transpose(1, 2), 3, out=out[..., 0])
    assert result.data_ptr() == out.data_ptr()
    assert result.equal(expected.transpose(1, 2))
    assert (out[..., 1] == out[0, 0, 0, 1]).all()
    assert round_to_bf16(torch.zeros(0, 3), 1).shape == (0, 3)
    with pytest.raises(TypeError, match=r"float32 \(convert it first\)"):
        round_to_bf16(x.double(), 1)
