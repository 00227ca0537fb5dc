"""Matrices divided by their norms, whatever their scale; the Triton kernels, in the interpreter,
are the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels.unit_norm import reference, unit_norm

try:
    from lather.kernels.unit_norm import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
SHAPES = [(3, 63, 500), (2, 1, 1), (1, 130, 260), (4, 5)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e-25, 1e30])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_are_1(
    implementation: ModuleType, shape: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    x = drawn(*shape) * scale
    x[0] *= 7.0
    wide = x.double()
    expected = wide / torch.linalg.vector_norm(wide, dim=tuple(range(1, x.dim())), keepdim=True)
    y = implementation.unit_norm(x, dtype)
    assert y.dtype == dtype
    assert_close(y, expected, dtype)


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_zeros_stay_and_what_is_not_finite_stays_in_its_matrix(
    implementation: ModuleType, value: float
) -> None:
    x = drawn(3, 130, 260)
    x[0], x[1, 100, 3] = 0.0, value
    zeros, wrong, right = implementation.unit_norm(x, torch.bfloat16)
    assert not zeros.any()
    assert wrong.isnan().all()
    assert right.equal(implementation.unit_norm(x[2:], torch.bfloat16)[0])


def test_other_dtypes_strides_and_no_matrices() -> None:
    x = drawn(2, 9, 7).double()
    y = unit_norm(x.mT, torch.float64)
    assert_close(y, unit_norm(x, torch.float64).mT, torch.float64)
    assert y.stride() == x.mT.stride()
    assert unit_norm(x[:0], torch.float32).shape == (0, 9, 7)
