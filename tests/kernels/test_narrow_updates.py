"""The change of fp32 weights by bf16 updates; the Triton kernel, in the interpreter, is the
reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels.narrow_updates import change_by_, reference

try:
    from lather.kernels.narrow_updates import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(63, 500), (1,), (0, 4), (3, 21, 33)], ids=str)
def test_the_change_is_that_by_the_widened_update(
    implementation: ModuleType, shape: tuple[int, ...]
) -> None:
    w, u = drawn(*shape, seed=0), drawn(*shape, seed=1).bfloat16()
    expected = 0.99 * w.double() - 0.3 * u.double()
    kept = u.clone()
    implementation.change_by_(w, u, 0.01, 0.3)
    assert_close(w, expected, torch.float32)
    assert u.equal(kept)


def test_the_bits_are_those_of_fused_sgd_on_a_gpu() -> None:
    """It rounds the rates to fp32, and each of two sums once; rates in fp64 would change about 1 %
    of the bits."""
    w, u = drawn(63, 500, seed=0), drawn(63, 500, seed=1).bfloat16()
    decay, lr = 1e-3, 0.02
    of_weight, rate = torch.tensor([decay / lr, lr]).double()
    sums = (u.double() + of_weight * w.double()).float()
    expected = (w.double() - rate * sums.double()).float()
    reference.change_by_(w, u, decay, lr)
    assert w.equal(expected)


@IMPLEMENTATIONS
def test_what_is_not_finite_stays_where_it_is(implementation: ModuleType) -> None:
    w, u = drawn(63, seed=0), drawn(63, seed=1).bfloat16()
    u[3], u[5] = torch.inf, torch.nan
    implementation.change_by_(w, u, 0.01, 0.3)
    assert (~w.isfinite()).nonzero().flatten().tolist() == [3, 5]
    assert w[5].isnan()


def test_any_strides_and_dtypes() -> None:
    w, u = drawn(9, 7, seed=0), drawn(7, 9, seed=1)
    expected = w * 0.99 - 0.3 * u.mT
    version = w._version
    change_by_(w, u.mT, 0.01, 0.3)
    torch.testing.assert_close(w, expected, rtol=0, atol=5e-7)
    assert w._version > version
