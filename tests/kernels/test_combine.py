"""The weighted sum over slots against plain indexing under autograd; the Triton kernels, in the
interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels import combine as op
from lather.kernels.combine import reference, weighted_combine

try:
    from lather.kernels.combine import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)

SHAPES = [
    (63, 3, 33, 200),
    (500, 2, 4, 1000),
    (2, 6, 1100, 12),
    (1, 1, 1, 1),
    (0, 2, 3, 4),
    (3, 2, 3, 0),
]  # tokens, slots, columns, rows


def inputs(
    tokens: int, slots: int, columns: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    return (
        values.to(dtype),
        row,
        weights,
        torch.randn(tokens, columns, generator=generator).to(dtype),
    )


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
def test_sums_and_gradients(
    implementation: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    rows, row_TK, weights_TK, grad = inputs(*shape, dtype)
    weights_TK = weights_TK.to(torch.promote_types(dtype, torch.float32))
    leaves = rows.double().requires_grad_(), weights_TK.double().requires_grad_()
    out = plain(leaves[0], row_TK, leaves[1])
    actual = implementation.combine_forward(rows, row_TK, weights_TK)
    assert actual.dtype == dtype
    assert_close(actual, out.detach(), dtype)
    total = implementation.combine_forward(rows, row_TK)
    assert total.dtype == dtype
    assert_close(total, plain(rows, row_TK, torch.ones_like(weights_TK)), dtype)

    expected = [torch.zeros_like(leaf) for leaf in leaves]
    if out.requires_grad:
        expected = list(torch.autograd.grad(out, leaves, grad.double(), materialize_grads=True))
    grad_rows, grad_weights = implementation.combine_backward(grad, rows, row_TK, weights_TK)
    assert (grad_rows.dtype, grad_weights.dtype) == (dtype, weights_TK.dtype)
    assert_close(grad_rows, expected[0], dtype)
    assert_close(grad_weights, expected[1], torch.promote_types(dtype, torch.float32))


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


def test_fp32_is_the_plain_formula_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = (
        torch.randn(189, 33, generator=generator),
        torch.rand(63, 3, generator=generator),
    )
    row_TK = torch.randperm(189, generator=generator).view(63, 3)
    expected = (rows[row_TK] * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(
        weighted_combine(rows, row_TK, weights), expected, rtol=1e-6, atol=1e-6
    )


def test_blocks_of_tokens_join(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, row_TK, weights, grad = inputs(63, 3, 8, 200, torch.bfloat16)
    whole = [
        reference.combine_forward(rows, row_TK, weights),
        *reference.combine_backward(grad, rows, row_TK, weights),
    ]
    monkeypatch.setattr(reference, "BLOCK", 40)
    for one, other in zip(
        [
            reference.combine_forward(rows, row_TK, weights),
            *reference.combine_backward(grad, rows, row_TK, weights),
        ],
        whole,
        strict=True,
    ):
        assert torch.equal(one, other)


def test_gradients_of_the_public_operation() -> None:
    rows, row_TK, weights, _ = inputs(7, 2, 3, 20, torch.float64)
    leaves = rows.nan_to_num(1.0).requires_grad_(), weights.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda r, w: weighted_combine(r, row_TK, w), leaves)
    assert torch.autograd.gradcheck(
        lambda r: weighted_combine(r, row_TK, weights.double()), leaves[:1]
    )


@IMPLEMENTATIONS
def test_rows_back_to_pairs(implementation: ModuleType) -> None:
    row_TK = torch.tensor([[3, -1], [0, 4]])
    assert implementation.pair_of_row(row_TK, 6).tolist() == [2, -1, -1, 0, 3, -1]


def test_errors_name_value_and_constraint() -> None:
    rows, row_TK, weights = torch.zeros(4, 3), torch.tensor([[3, -1], [0, 2]]), torch.ones(2, 2)
    weighted_combine(rows, row_TK, weights)
    with pytest.raises(TypeError, match=r"rows are torch.int64"):
        op.validate(rows.long(), row_TK, weights)
    with pytest.raises(TypeError, match=r"row_TK is torch.int32.*int64"):
        op.validate(rows, row_TK.int(), weights)
    with pytest.raises(ValueError, match=r"row_TK \(4,\)"):
        op.validate(rows, row_TK.flatten(), weights)
    with pytest.raises(ValueError, match=r"weights_TK has shape \(2, 1\)"):
        op.validate(rows, row_TK, weights[:, :1])
    with pytest.raises(ValueError, match="meta"):
        op.validate(rows, row_TK.to("meta"), weights)
    for wrong in (4, -2):
        row_TK[0, 1] = wrong
        with pytest.raises(ValueError, match=rf"row_TK holds {wrong}: .*\[-1, 4\)"):
            weighted_combine(rows, row_TK, weights)
    row_TK[0, 1] = 2
    with pytest.raises(ValueError, match="row_TK holds 2 twice"):
        weighted_combine(rows, row_TK, weights)


def test_raw_operations_are_without_autograd() -> None:
    rows, row_TK, weights, grad = inputs(3, 2, 3, 9, torch.float32)
    rows.requires_grad_()
    outputs = op.combine_backward(grad, rows, row_TK, weights.requires_grad_())
    for tensor in (
        *outputs,
        op.combine_forward(rows, row_TK, weights),
        op.combine_forward(rows, row_TK),
    ):
        assert not tensor.requires_grad


@IMPLEMENTATIONS
def test_rows_without_a_token_have_no_gradient_whatever_the_gradient(
    implementation: ModuleType,
) -> None:
    row_TK = torch.tensor([[1], [2]])
    grad = torch.tensor([[float("inf")], [1.0]])
    grad_rows, _ = implementation.combine_backward(grad, torch.ones(4, 1), row_TK, torch.ones(2, 1))
    assert grad_rows.flatten().tolist() == [0.0, float("inf"), 1.0, 0.0]


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
    grad_rows, grad_weights = implementation.combine_backward(
        torch.ones(2, 2, dtype=dtype), rows, row_TK, weights
    )
    assert grad_rows.tolist() == [[0.0, 0.0], [0.5, 0.5]]
    assert grad_weights.tolist() == [[0.0, 5.0], [0.0, 0.0]]
