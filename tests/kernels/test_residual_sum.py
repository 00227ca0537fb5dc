"""The sum at the end of a block: the kernel, in the interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, assert_close, on_each
from lather.kernels.residual_sum import reference, residual_sum

try:
    from lather.kernels.residual_sum import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

BF16 = torch.bfloat16


def draw(*dtypes: torch.dtype, rows: int = 63, columns: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, columns, generator=generator).to(dtype) for dtype in dtypes]


@INTERPRETER
@pytest.mark.parametrize("shared", [None, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("routed", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(63, 33), (1, 1), (3, 2100), (0, 8)], ids=str)
def test_against_the_reference(
    shape: tuple[int, int], routed: torch.dtype, shared: torch.dtype | None
) -> None:
    rows, columns = shape
    x, a, b = draw(torch.float32, routed, shared or BF16, rows=rows, columns=columns)
    terms = (x.view(1, *shape), a, None if shared is None else b)
    expected, actual = reference.add_terms(*terms), triton.add_terms(*terms)
    assert actual.shape == (1, *shape)
    assert_close(actual, expected, torch.float32)


@on_each(reference, triton)
def test_slices_nan_and_infinity(implementation: ModuleType) -> None:
    x, a, b = draw(torch.float32, BF16, BF16)
    x[1, 2], a[4, 5], b[9, 0] = torch.inf, torch.nan, -torch.inf
    out = implementation.add_terms(x[:, 1:], a.t().contiguous().t()[:, 1:], b[:, :-1])
    assert (~out.isfinite()).nonzero().tolist() == [[1, 1], [4, 4], [9, 0]]


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, torch.float32), (BF16, None)], ids=str)
def test_gradients_are_those_of_plain_autograd(dtypes: tuple[torch.dtype | None, ...]) -> None:
    x, grad, *terms = draw(torch.float32, torch.float32, *(d for d in dtypes if d is not None))
    saved: list[Tensor] = []
    results = []
    for add in (reference.add_terms, residual_sum):
        leaves = [one.clone().requires_grad_() for one in (x.view(7, 9, 33), *terms)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            out = add(*leaves, *[None] * (3 - len(leaves)))
        results.append((out, *torch.autograd.grad(out, leaves, grad.view(7, 9, 33))))
    for actual, expected in zip(*results, strict=True):
        assert actual.equal(expected)
    assert not saved


def test_the_sum_in_parentheses_is_not_rounded() -> None:
    one, tiny = torch.ones(1, 1), torch.full((1, 1), 2.0**-10, dtype=BF16)
    assert residual_sum(-one, one.to(BF16), tiny).item() == 2.0**-10


@on_each(reference, triton)
def test_the_sum_has_the_dtype_of_the_residual(implementation: ModuleType) -> None:
    x, a, b = draw(BF16, BF16, torch.float32)
    out = implementation.add_terms(x, a, b)
    assert_close(out, (x.float() + (a.float() + b)).to(BF16), BF16)
    assert out.dtype == BF16
