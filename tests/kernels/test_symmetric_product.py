"""Symmetric products: x x^T, alone and added to a matrix, in both orders of memory; the Triton
kernel, in the interpreter, is the reference, and its results are symmetric to the bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels import symmetric_product as op
from lather.kernels.symmetric_product import add_symmetric_product, reference, symmetric_product
from lather.optim.batched.plan import matmul_precision

try:
    from lather.kernels.symmetric_product import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
SHAPES = [(2, 1, 1), (1, 63, 500), (3, 130, 33), (1, 257, 65), (0, 5, 4)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def square(b: int, m: int, dtype: torch.dtype) -> Tensor:
    x = drawn(b, m, m)
    return (x + x.mT).to(dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("_products_of_bf16")
def test_products(
    implementation: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, total = drawn(*shape, dtype=dtype), square(*shape[:2], dtype)
    wide = x.double() @ x.double().mT
    for y in (x, x.mT.contiguous().mT):
        product = implementation.symmetric_product(y)
        assert product.dtype == dtype
        assert_close(product, wide, dtype)
        options = {"beta": 0.9, "alpha": 0.3, "out": None}
        sums = implementation.add_symmetric_product(total, y, **options)
        assert sums.dtype == dtype
        assert_close(sums, 0.9 * total.double() + 0.3 * wide, dtype)
        if implementation is triton:
            assert product.equal(product.mT)
            assert sums.equal(sums.mT)


@IMPLEMENTATIONS
def test_a_sum_in_place_reads_lower_triangles_and_nothing_if_beta_is_0(
    implementation: ModuleType,
) -> None:
    x, total = drawn(2, 130, 20), square(2, 130, torch.float32)
    expected = 0.5 * total.double() + 2.0 * x.double() @ x.double().mT
    out = implementation.add_symmetric_product(total, x, beta=0.5, alpha=2.0, out=total)
    assert out is total
    assert_close(total, expected, torch.float32)
    poisoned = torch.full_like(total, torch.nan)
    implementation.add_symmetric_product(poisoned, x, beta=0.0, alpha=2.0, out=poisoned)
    assert_close(poisoned, 2.0 * x.double() @ x.double().mT, torch.float32)


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_upper_triangles_of_a_total_are_not_read() -> None:
    x, total = drawn(1, 130, 20), square(1, 130, torch.float32)
    expected = triton.add_symmetric_product(total, x, beta=0.5, alpha=2.0, out=None)
    total[:, torch.ones(130, 130).triu(1).bool()] = torch.nan
    assert triton.add_symmetric_product(total, x, beta=0.5, alpha=2.0, out=None).equal(expected)


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_rows(implementation: ModuleType, value: float) -> None:
    x = drawn(2, 140, 40).abs() + 0.1
    expected = implementation.symmetric_product(x)
    x[1, 133, 39] = value
    found = implementation.symmetric_product(x)
    rest = torch.ones(2, 140, 140, dtype=torch.bool)
    rest[1, 133] = rest[1, :, 133] = False
    assert found[rest].equal(expected[rest])
    assert not found[~rest].isfinite().any()
    assert found[~rest].isnan().all() == (value != torch.inf)


@IMPLEMENTATIONS
def test_rows_of_larger_matrices(implementation: ModuleType) -> None:
    wide = drawn(3, 40, 30)
    x = wide[1:, 5:20, 3:29]
    assert_close(implementation.symmetric_product(x), x.double() @ x.double().mT, torch.float32)


def test_the_kernel_is_for_many_aligned_rows_in_a_precision_of_tensor_cores() -> None:
    x = torch.empty(2, 512, 520, dtype=torch.bfloat16)
    assert op.has_kernel_for(x)
    assert op.has_kernel_for(torch.empty(2, 520, 512, dtype=torch.bfloat16).mT)
    assert op.has_kernel_for(x[1:, :, 8:])
    for other in (x[:, 1:], x[..., 1:], x[..., ::2], x[..., :-1].contiguous(), x.half()):
        assert not op.has_kernel_for(other)
    assert not op.has_kernel_for(torch.nn.Parameter(x))
    with matmul_precision("high"):
        assert op.has_kernel_for(x.float())
        assert not op.has_kernel_for(torch.empty(2, 520, 512).mT)
    with matmul_precision("highest"):
        assert not op.has_kernel_for(x.float())
        assert op.has_kernel_for(x)
    assert not op.has_kernel_for(torch.empty(1, 50_000, 8, dtype=torch.bfloat16, device="meta"))


def test_a_cpu_has_the_bits_of_torch() -> None:
    x, total = drawn(2, 520, 16, dtype=torch.bfloat16), square(2, 520, torch.bfloat16)
    assert symmetric_product(x).equal(x @ x.mT)
    expected = total.clone().baddbmm_(x, x.mT, beta=0.9, alpha=0.1)
    assert add_symmetric_product(total, x, beta=0.9, alpha=0.1).equal(expected)
    assert add_symmetric_product(total, x, beta=0.9, alpha=0.1, out=total).equal(expected)
    assert total.equal(expected)


def test_flops_are_those_of_tiles_up_to_the_diagonal() -> None:
    x = torch.empty(3, 512, 70, device="meta")
    assert op.num_flops(x) * 16 == 10 * 3 * 2 * 512 * 512 * 70
