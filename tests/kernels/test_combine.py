"""The weighted sum over slots against plain indexing; the Triton kernels, in the
interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels.combine import combine_forward, reference

try:
    from lather.kernels.combine import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)

SHAPES = [(63, 3, 33, 200), (500, 2, 4, 1000), (2, 6, 1100, 12), (1, 1, 1, 1), (0, 2, 3, 4)]
SHAPES += [(3, 2, 3, 0)]
"""Tokens, slots, columns, rows."""


def inputs(
    tokens: int, slots: int, columns: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs. Rows that belong to no token hold NaN; a tenth of the pairs has no row, and no
    pair of token 0 has one."""
    generator = torch.Generator().manual_seed(tokens + columns)
    pairs = tokens * slots
    row = torch.full((pairs,), -1)
    row[: min(rows, pairs)] = torch.randperm(rows, generator=generator)[:pairs]
    row = row.masked_fill(torch.rand(pairs, generator=generator) < 0.1, -1).view(tokens, slots)
    if tokens > 1:
        row[0] = -1
    values = torch.full((rows, columns), float("nan"))
    used = row[row >= 0]
    values[used] = torch.randn(len(used), columns, generator=generator)
    weights = torch.rand(tokens, slots, generator=generator)
    return values.to(dtype), row, weights


def plain(rows: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out = []
    for t in range(len(row_TK)):
        total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
        for k, row in enumerate(row_TK[t].tolist()):
            if row >= 0:
                total = total + weights_TK[t, k].double() * rows[row].double()
        out.append(total)
    return torch.stack(out) if out else rows.new_zeros(0, rows.shape[1], dtype=torch.float64)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(
    implementation: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    rows, row_TK, weights_TK = inputs(*shape, dtype)
    weights_TK = weights_TK.to(torch.promote_types(dtype, torch.float32))
    actual = implementation.combine_forward(rows, row_TK, weights_TK)
    assert actual.dtype == dtype
    assert_close(actual, plain(rows, row_TK, weights_TK), dtype)
    total = implementation.combine_forward(rows, row_TK)
    assert total.dtype == dtype
    assert_close(total, plain(rows, row_TK, torch.ones_like(weights_TK)), dtype)


@IMPLEMENTATIONS
def test_slots_are_added_in_fp32(implementation: ModuleType) -> None:
    """256 + 1 + ... + 1 in bf16 would stay 256; weights are not rounded to bf16, either."""
    rows = torch.ones(41, 3, dtype=torch.bfloat16)
    rows[0] = 256
    row_TK = torch.arange(41).view(1, 41)
    assert implementation.combine_forward(rows, row_TK).tolist() == [[296.0] * 3]
    weights = torch.full((1, 41), 1 + 2**-8)
    weights[0, 0] = -(39 + 40 * 2**-8) / 256
    assert not torch.equal(weights.bfloat16().float(), weights)
    assert implementation.combine_forward(rows, row_TK, weights).tolist() == [[1.0] * 3]


def test_blocks_of_tokens_join(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(63, 3, 8, 200, torch.bfloat16)
    whole = reference.combine_forward(*arguments)
    monkeypatch.setattr(reference, "BLOCK", 40)
    assert torch.equal(reference.combine_forward(*arguments), whole)


def test_the_operation_is_without_autograd() -> None:
    rows, row_TK, weights = inputs(3, 2, 3, 9, torch.float32)
    rows.requires_grad_()
    assert not combine_forward(rows, row_TK, weights.requires_grad_()).requires_grad
    assert not combine_forward(rows, row_TK).requires_grad


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slot_without_a_row_adds_nothing_whatever_is_in_row_0(
    implementation: ModuleType, dtype: torch.dtype
) -> None:
    """An index of -1 is clamped to row 0."""
    rows = torch.tensor([[float("nan"), float("inf")], [2.0, 3.0]], dtype=dtype)
    row_TK = torch.tensor([[-1, 1], [-1, -1]])
    weights = torch.tensor([[4.0, 0.5], [1.0, 1.0]])
    assert implementation.combine_forward(rows, row_TK, weights).tolist() == [
        [1.0, 1.5],
        [0.0, 0.0],
    ]
    assert implementation.combine_forward(rows, row_TK).tolist() == [[2.0, 3.0], [0.0, 0.0]]
