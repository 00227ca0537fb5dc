"""Nesterov's momentum: the reference has the bits of torch's operations, and the Triton kernel, in
the interpreter, is the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels.momentum import nesterov_, reference

try:
    from lather.kernels.momentum import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("shape", [(3, 21, 33), (500, 5), (1,), (0, 4)], ids=str)
def test_two_averages(
    implementation: ModuleType, shape: tuple[int, ...], mu: float, dtype: torch.dtype
) -> None:
    g, b = drawn(*shape, seed=0, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
    gradient, before = g.double(), b.double()
    momentum = mu * before + (1 - mu) * gradient
    n = implementation.nesterov_(b, g, mu)
    assert_close(b, momentum, dtype)
    assert_close(n, mu * momentum + (1 - mu) * gradient, dtype)
    assert g.double().equal(gradient)


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_stays_where_it_is(implementation: ModuleType) -> None:
    g, b = drawn(63, seed=0), drawn(63, seed=1)
    g[3], b[5] = torch.inf, torch.nan
    n = implementation.nesterov_(b, g, 0.9)
    for x in (n, b):
        assert (~x.isfinite()).nonzero().flatten().tolist() == [3, 5]


def test_any_strides_have_the_bits_of_torch() -> None:
    g, b = drawn(9, 7, seed=0).mT, drawn(9, 14, seed=1).mT[::2]
    momentum = b.lerp(g, 1 - 0.9)
    assert nesterov_(b, g, 0.9).equal(g.lerp(momentum, 0.9))
    assert b.equal(momentum)
