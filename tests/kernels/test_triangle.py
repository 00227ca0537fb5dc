"""Packed triangles: every element of the lower triangle once, in the published order, and back; the
Triton kernels, in the interpreter, do the same."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import on_each
from lather.kernels.triangle import (
    dequantize_triangle,
    pack_triangle,
    quantize_triangle,
    reference,
    triangle_numel,
    unpack_triangle,
)

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


def gram(batch: int, n: int, *, spread: float = 3.0) -> Tensor:
    """Return products with their transposes; sizes of the rows differ by `spread` decades."""
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(batch, n, 2 * n, generator=generator)
    g *= torch.logspace(0, -spread, n)[torch.randperm(n, generator=generator), None]
    return g @ g.mT


@IMPLEMENTATIONS
@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 64, 65])
def test_codes_of_16_bits_against_loops(implementation: ModuleType, n: int) -> None:
    x = gram(2, n)
    codes = torch.empty(2, triangle_numel(n), dtype=torch.int16)
    diagonal, again = torch.empty(2, n), torch.empty_like(x)
    implementation.quantize_triangle(x, codes, diagonal, 7)
    implementation.dequantize_triangle(codes, diagonal, again)
    assert diagonal.equal(x.diagonal(dim1=1, dim2=2))
    assert again.equal(again.mT)
    assert again.diagonal(dim1=1, dim2=2).equal(diagonal)
    for matrix, code in zip(x.double(), codes.tolist(), strict=True):
        for (i, j), number in zip(places(n) if n else [], code, strict=True):
            unit = math.sqrt(matrix[i, i] * matrix[j, j]) / 32767
            assert abs(matrix[i, j] / unit - number) <= 1 + 1 / 32
            assert i != j or number == 32767
    if n > 1:
        roots = diagonal.double().sqrt()
        bound = roots[:, :, None] * roots[:, None, :] / 32767 * (1 + 1 / 32)
        assert ((again - x).abs() <= bound).all()
        assert not ((1.01 * again - x).abs() <= bound).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("n", [1, 65])
def test_decoded_codes_of_16_bits_are_encoded_alike_in_any_step(
    implementation: ModuleType, n: int
) -> None:
    x = gram(2, n, spread=12.0)
    codes, diagonal = torch.empty(2, triangle_numel(n), dtype=torch.int16), torch.empty(2, n)
    implementation.quantize_triangle(x, codes, diagonal, 0)
    first, again = codes.clone(), torch.empty_like(x)
    implementation.dequantize_triangle(codes, diagonal, again)
    for step in range(5):
        implementation.quantize_triangle(again, codes, diagonal, step)
        assert codes.equal(first)


@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("n", [1, 33, 64])
def test_codes_of_16_bits_are_the_same_bits_in_triton(n: int) -> None:
    x = gram(3, n)
    x[0, 0] = x[0, :, 0] = 0.0  # an idle row
    results = []
    for implementation in (reference, triton):
        codes, diagonal = torch.empty(3, triangle_numel(n), dtype=torch.int16), torch.empty(3, n)
        out = torch.empty_like(x)
        implementation.quantize_triangle(x, codes, diagonal, 5)
        implementation.dequantize_triangle(codes, diagonal, out)
        results.append((codes, diagonal, out))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_codes_of_16_bits_keep_their_expectation() -> None:
    x, total, count = gram(1, 64, spread=1.0), torch.zeros(1, 64, 64, dtype=torch.float64), 400
    codes, diagonal = torch.empty(1, triangle_numel(64), dtype=torch.int16), torch.empty(1, 64)
    for step in range(count):
        quantize_triangle(x, codes, diagonal, step)
        total += dequantize_triangle(codes, diagonal)
    roots = diagonal.sqrt()
    error = (total / count - x) / (roots[:, :, None] * roots[:, None, :] / 32767)
    assert error.abs().max() <= 5 * 0.5 / math.sqrt(count) + 1 / 32
    assert error.mean().abs() <= 0.01


def test_codes_of_16_bits_of_odd_matrices() -> None:
    """Zeros, one huge element, denormals, an element beyond its bound, another dtype, strides."""

    def restored(x: Tensor) -> Tensor:
        codes = torch.empty(*x.shape[:-2], triangle_numel(x.shape[-1]), dtype=torch.int16)
        diagonal = torch.empty(x.shape[:-1])
        quantize_triangle(x, codes, diagonal, 3)
        return dequantize_triangle(codes, diagonal)

    assert restored(torch.zeros(2, 5, 5)).equal(torch.zeros(2, 5, 5))
    huge = gram(1, 6)
    huge[0, 2, 2] = 1e38
    assert restored(huge).diagonal(dim1=1, dim2=2).equal(huge.diagonal(dim1=1, dim2=2))
    small = gram(1, 6, spread=0.0) * 1e-37
    assert (restored(small) - small).abs().max() <= 1e-4 * small.max()
    beyond = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    assert torch.allclose(restored(beyond), torch.ones(2, 2), atol=1e-6, rtol=0)
    negative = torch.tensor([[-1.0, 3.0], [3.0, 1.0]])
    assert restored(negative).equal(torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))
    x = gram(3, 9)
    assert restored(torch.stack((x, x), -1)[..., 0]).equal(restored(x))
    with pytest.raises(TypeError, match=r"x is torch.float64: has to be torch.float32"):
        restored(x.double())
