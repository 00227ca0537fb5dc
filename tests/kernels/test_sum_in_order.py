"""The sum of parts in a fixed order: the kernel, in the interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.implementations import INTERPRETER, assert_close, on_each
from lather.kernels.sum_in_order import reference, sum_in_order

try:
    from lather.kernels.sum_in_order import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def draw(parts: int, elements: int) -> torch.Tensor:
    return torch.randn(parts, elements, generator=torch.Generator().manual_seed(elements))


@INTERPRETER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2100), (8, 63), (1, 1), (2, 1), (4, 0)], ids=str)
def test_against_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    parts = draw(*shape).to(dtype)
    assert_close(triton.sum_in_order(parts), reference.sum_in_order(parts), dtype)


@on_each(reference, triton)
def test_the_order_is_that_of_the_parts(implementation: ModuleType) -> None:
    """The sum of 1, 2^24 and -2^24 is 0 in fp32, and 1 with the first at the end."""
    parts = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]]).expand(3, 5)
    assert implementation.sum_in_order(parts).tolist() == [0.0] * 5
    assert implementation.sum_in_order(parts.roll(-1, 0)).tolist() == [1.0] * 5


@on_each(reference, triton)
def test_nan_and_infinity(implementation: ModuleType) -> None:
    parts = draw(3, 40)
    parts[0, 1], parts[2, 5], parts[1, 39] = torch.nan, torch.inf, -torch.inf
    total = implementation.sum_in_order(parts)
    assert (~total.isfinite()).nonzero().flatten().tolist() == [1, 5, 39]


def test_bf16_is_rounded_once() -> None:
    parts = torch.tensor([[1.0], *[[2.0**-9]] * 4], dtype=torch.bfloat16)
    assert sum_in_order(parts).item() == 1 + 2.0**-7
