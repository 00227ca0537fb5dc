"""Nesterov's momentum: the reference has the bits of torch's operations, and the Triton kernel, in
the interpreter, is the reference."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, is_close, on_each
from lather.kernels.momentum import nesterov_, reference, unit_nesterov_

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


@IMPLEMENTATIONS
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("shape", [(3, 63, 500), (2, 1, 1), (4, 5)], ids=str)
def test_a_factor_multiplies_the_gradient_as_it_is_read(
    implementation: ModuleType, shape: tuple[int, ...], mu: float
) -> None:
    g, b, factor = drawn(*shape, seed=0), drawn(*shape, seed=1), 0.37

    def results(g: Tensor, *factors: float) -> list[Tensor]:
        momenta = [b.clone(), b.clone()]
        n = implementation.nesterov_(momenta[0], g, mu, *factors)
        y = implementation.unit_nesterov_(momenta[1], g, mu, torch.float32, *factors)
        return [*momenta, n, y]

    actual, before = results(g, factor), g.clone()
    expected, wrong = results(g * factor), results(g * (1.01 * factor))
    assert g.equal(before)
    for x, right, other in zip(actual, expected, wrong, strict=True):
        assert_close(x, right, torch.float32)
        is_only_a_sign = x is actual[3] and (mu == 0.0 or shape[1:] == (1, 1))
        assert is_only_a_sign or not is_close(x, other, torch.float32)


def test_a_factor_has_the_bits_of_gradients_multiplied_before() -> None:
    g, b = drawn(9, 7, seed=0), drawn(9, 7, seed=1)
    expected, momentum = reference.nesterov_(before := b.clone(), g * 0.37, 0.9), before
    assert nesterov_(b, g, 0.9, 0.37).equal(expected)
    assert b.equal(momentum)


def test_any_strides_have_the_bits_of_torch() -> None:
    g, b = drawn(9, 7, seed=0).mT, drawn(9, 14, seed=1).mT[::2]
    momentum = b.lerp(g, 1 - 0.9)
    assert nesterov_(b, g, 0.9).equal(g.lerp(momentum, 0.9))
    assert b.equal(momentum)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("shape", [(3, 63, 500), (2, 1, 1), (1, 130, 260), (4, 5)], ids=str)
def test_unit_norms(
    implementation: ModuleType, shape: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    g, b = drawn(*shape, seed=0) * scale, drawn(*shape, seed=1) * scale
    momentum = 0.95 * b.double() + 0.05 * g.double()
    n = 0.95 * momentum + 0.05 * g.double()
    n /= torch.linalg.vector_norm(n, dim=tuple(range(1, n.dim())), keepdim=True)
    y = implementation.unit_nesterov_(b, g, 0.95, dtype)
    assert y.dtype == dtype
    assert_close(y, n, dtype)
    assert_close(b, momentum, torch.float32)


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unit_norms_of_zeros_and_of_what_is_not_finite(
    implementation: ModuleType, value: float
) -> None:
    g, b = drawn(3, 130, 260, seed=0), drawn(3, 130, 260, seed=1)
    g[0], b[0], g[1, 100, 3] = 0.0, 0.0, value
    alone = implementation.unit_nesterov_(b[2:].clone(), g[2:], 0.95, torch.bfloat16)
    zeros, wrong, right = implementation.unit_nesterov_(b, g, 0.95, torch.bfloat16)
    assert not zeros.any()
    assert wrong.isnan().all()
    assert right.equal(alone[0])


@IMPLEMENTATIONS
def test_unit_norms_are_those_of_both_operations(implementation: ModuleType) -> None:
    g, b = drawn(2, 63, 200, seed=0), drawn(2, 63, 200, seed=1)
    before = b.clone()
    y = implementation.unit_nesterov_(b, g, 0.9, torch.float32)
    norms = importlib.import_module(implementation.__name__.replace("momentum", "unit_norm"))
    assert y.equal(norms.unit_norm(implementation.nesterov_(before, g, 0.9), torch.float32))
    assert b.equal(before)


def test_unit_norms_of_no_matrices_and_other_strides() -> None:
    g, b = drawn(2, 9, 7, seed=0).mT, drawn(2, 7, 9, seed=1)
    assert unit_nesterov_(b[:0], g[:0], 0.9, torch.float32).shape == (0, 7, 9)
    expected = reference.unit_nesterov_(b.clone(), g.contiguous(), 0.9, torch.float32)
    assert_close(unit_nesterov_(b, g, 0.9, torch.float32), expected, torch.float32)
