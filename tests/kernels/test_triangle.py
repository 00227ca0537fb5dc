"""Packed triangles: every element of the lower triangle once, in the published order, and back; the
Triton kernels, in the interpreter, do the same."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import on_each
from lather.kernels.triangle import pack_triangle, reference, triangle_numel, unpack_triangle

try:
    from lather.kernels.triangle import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)


def symmetric(batch: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(batch, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return (x + x.mT).to(dtype)


def places(n: int) -> list[tuple[int, int]]:
    """List row and column of each packed element, after LAPACK's description: the columns of the
    rectangle from the left, and in the corner the other columns, transposed."""
    h, extra = (n + 1) // 2, 1 - n % 2
    rectangle = {(i + extra, j): (i, j) for j in range(h) for i in range(j, n)}
    corner = {(j - h, i - h + 1 - extra): (i, j) for j in range(h, n) for i in range(j, n)}
    assert not rectangle.keys() & corner.keys()
    return [(rectangle | corner)[row, column] for row in range(n + extra) for column in range(h)]


@IMPLEMENTATIONS
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_there_and_back(implementation: ModuleType, n: int, dtype: torch.dtype) -> None:
    x = symmetric(3, n, dtype)
    packed = torch.empty(3, n * (n + 1) // 2, dtype=dtype)
    implementation.pack_triangle(x, packed)
    for one, matrix in zip(packed.tolist(), x.tolist(), strict=True):
        assert one == [matrix[i][j] for i, j in places(n)]
    again = torch.empty_like(x)
    implementation.unpack_triangle(packed, again)
    assert again.equal(x)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("n", [0, 3, 4])
def test_no_matrices(implementation: ModuleType, shape: tuple[int, ...], n: int) -> None:
    x, packed = torch.empty(*shape, n, n), torch.empty(*shape, triangle_numel(n))
    implementation.pack_triangle(x, packed)
    implementation.unpack_triangle(packed, x)
    assert pack_triangle(x).shape == packed.shape
    assert unpack_triangle(packed, n).shape == x.shape


@IMPLEMENTATIONS
def test_a_product_that_is_symmetric_up_to_rounding_becomes_symmetric(
    implementation: ModuleType,
) -> None:
    x = symmetric(1, 33)
    x = x + 1e-6 * torch.randn(33, 33, generator=torch.Generator().manual_seed(1))
    packed, again = torch.empty(1, triangle_numel(33)), torch.empty_like(x)
    implementation.pack_triangle(x, packed)
    implementation.unpack_triangle(packed, again)
    assert again.equal(again.mT)
    assert torch.allclose(again, x, atol=1e-4, rtol=0)
    assert not torch.allclose(1.01 * again, x, atol=1e-4, rtol=0)


@IMPLEMENTATIONS
def test_results_in_another_dtype(implementation: ModuleType) -> None:
    x = symmetric(2, 20)
    packed = torch.empty(2, triangle_numel(20), dtype=torch.bfloat16)
    implementation.pack_triangle(x.bfloat16().float(), packed)
    again = torch.empty_like(x)
    implementation.unpack_triangle(packed, again)
    assert again.equal(x.bfloat16().float())


def test_any_strides_a_given_output_and_errors() -> None:
    x = symmetric(4, 7)
    wide = torch.stack((x, x), -1)[1:3, ..., 0]
    packed = pack_triangle(wide)
    assert packed.equal(pack_triangle(x)[1:3])
    out = torch.empty(2, 7, 7)
    assert unpack_triangle(packed, 7, out=out) is out
    assert out.equal(x[1:3])
    assert unpack_triangle(pack_triangle(x[0]), 7).equal(x[0])
    with pytest.raises(ValueError, match=r"packed has 28 elements, n is 8.*= 36"):
        unpack_triangle(packed, 8)
