"""The two parts of fp32 matrices; the Triton kernel, in the interpreter, is the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels.split_parts import reference, split_parts

try:
    from lather.kernels.split_parts import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
SHAPES = [(3, 63, 500), (2, 1, 1), (1, 130, 65), (0, 4, 4), (2, 0, 3)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def parts_like(x: Tensor) -> tuple[Tensor, Tensor]:
    hi, mid = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    return hi, mid


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_of_the_parts_is_the_matrix(
    implementation: ModuleType, shape: tuple[int, ...]
) -> None:
    x = drawn(*shape)
    hi, mid = parts_like(x)
    implementation.split_parts(x, hi, mid)
    assert_close(hi, x, torch.bfloat16)
    for factor, is_right in ((1.0, True), (1.02, False)):
        error = (hi.double() + factor * mid.double() - x.double()).norm()
        # the interpreter cuts bits off where bf16 should be rounded
        is_small = bool(error <= 1.5e-5 * x.double().norm())
        assert is_small is is_right or not x.numel()


@IMPLEMENTATIONS
@pytest.mark.parametrize("of_x", [False, True])
@pytest.mark.parametrize("of_parts", [False, True])
def test_views_of_rows_or_columns(implementation: ModuleType, of_x: bool, of_parts: bool) -> None:
    whole = drawn(2, 200, 200)
    x = (whole.mT if of_x else whole)[:, 70:170, 3:66]
    buffers = tuple(torch.full((2, 200, 200), 7.0, dtype=torch.bfloat16) for _ in range(2))
    hi, mid = ((b.mT if of_parts else b)[:, 100:, 9:72] for b in buffers)
    implementation.split_parts(x, hi, mid)
    plain = parts_like(x.contiguous())
    implementation.split_parts(x.contiguous(), *plain)
    assert hi.equal(plain[0])
    assert mid.equal(plain[1])
    for buffer, part in zip(buffers, (hi, mid), strict=True):
        part.fill_(7.0)
        assert (buffer == 7.0).all()  # nothing beside the views was written


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_stays_where_it_is(implementation: ModuleType) -> None:
    x = drawn(2, 65, 65)
    x[0, 3, 64], x[1, 64, 0] = torch.inf, torch.nan
    hi, mid = parts_like(x)
    implementation.split_parts(x, hi, mid)
    for part in (hi, mid):
        assert (~part.isfinite()).nonzero().tolist() == [[0, 3, 64], [1, 64, 0]]


def test_the_parts_are_those_of_rounding() -> None:
    x = drawn(2, 30, 40)
    hi, mid = parts_like(x)
    split_parts(x, hi, mid)
    assert hi.equal(x.bfloat16())
    assert mid.equal((x - x.bfloat16().float()).bfloat16())
