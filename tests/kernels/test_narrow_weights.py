"""The change of bf16 weights: with remainders it is that of fp32 weights, without them it is right
on average; the Triton kernels, in the interpreter, are the reference."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import on_each
from lather.kernels.narrow_weights import change_, reference
from lather.kernels.remainder import join, split

try:
    from lather.kernels.narrow_weights import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
RATES = {"decay": 0.01, "lr": 0.3, "step": 5}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(x: Tensor, u: Tensor) -> Tensor:
    return (1 - RATES["decay"]) * x.double() - RATES["lr"] * u.double()


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(63, 50), (1,), (0, 4), (3, 21, 33)], ids=str)
def test_weights_with_remainders_are_those_of_fp32(
    implementation: ModuleType, shape: tuple[int, ...]
) -> None:
    x, u = drawn(*shape, seed=0), drawn(*shape, seed=1)
    w, r = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    split(x, w, r)
    implementation.change_(w, u, r, **RATES)
    expected = stepped(x, u).float()
    assert w.equal(expected.bfloat16())
    bound = 3e-7 * (x.abs() + u.abs())
    assert ((join(w, r) - expected).abs() <= bound).all()
    assert not expected.numel() or not ((1.01 * join(w, r) - expected).abs() <= bound).all()


@IMPLEMENTATIONS
def test_weights_without_remainders_are_right_on_average(implementation: ModuleType) -> None:
    before, u, count = drawn(500, seed=0).bfloat16(), drawn(500, seed=1), 400
    total = torch.zeros(500, dtype=torch.float64)
    for step in range(count):
        w = before.clone()
        implementation.change_(w, u, None, **(RATES | {"step": step}))
        total += w
    expected = stepped(before, u)
    unit = torch.finfo(torch.bfloat16).eps * expected.abs()
    error = (total / count - expected) / unit
    assert error.abs().max() <= 5 * 0.5 / math.sqrt(count)
    assert error.mean().abs() <= 0.01


@IMPLEMENTATIONS
def test_what_is_not_finite_stays_where_it_is(implementation: ModuleType) -> None:
    u = drawn(63, seed=1)
    u[3], u[5] = torch.inf, torch.nan
    for r in (None, torch.zeros(63, dtype=torch.int16)):
        w = drawn(63, seed=0).bfloat16()
        implementation.change_(w, u, r, **RATES)
        assert (~w.isfinite()).nonzero().flatten().tolist() == [3, 5]
        assert w[5].isnan()


def test_any_strides() -> None:
    w, u = drawn(9, 7, seed=0).bfloat16(), drawn(7, 9, seed=1)
    expected = w.clone()
    change_(w.mT, u, None, **RATES)
    change_(expected, u.mT.contiguous(), None, **RATES)
    assert w.equal(expected)
