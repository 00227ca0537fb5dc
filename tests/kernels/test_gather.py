"""Gathering rows against plain indexing under autograd; the Triton kernels, in the interpreter,
against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, on_each
from lather.kernels import gather as op
from lather.kernels.gather import padded_index_gather, reference

try:
    from lather.kernels.gather import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)

SHAPES = [(63, 33, 500), (5, 2100, 3), (100, 1, 63), (1, 4, 9), (4, 3, 0), (0, 3, 2), (0, 3, 0)]


def inputs(
    rows: int, columns: int, picked: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns + picked)
    x = torch.randn(rows, columns, generator=generator).to(dtype)
    index = (
        torch.randint(-1, max(rows, 1), (picked,), generator=generator)
        if rows
        else torch.full((picked,), -1)
    )
    return x, index, torch.randn(picked, columns, generator=generator).to(dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_their_adjoint(
    implementation: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, index, grad = inputs(*shape, dtype)
    with_zeros = torch.cat([x, x.new_zeros(1, x.shape[1])])  # an index of -1 picks this last row
    assert torch.equal(implementation.gather_rows(x, index), with_zeros[index])
    padded = implementation.gather_rows(x, index, len(index) + 5)
    assert torch.equal(padded, torch.cat([with_zeros[index], x.new_zeros(5, x.shape[1])]))

    sums = [[0.0] * x.shape[1] for _ in range(len(x))]
    for row, values in zip(index.tolist(), grad.tolist(), strict=True):
        if row >= 0:
            sums[row] = [a + b for a, b in zip(sums[row], values, strict=True)]
    actual = implementation.add_rows(grad, index, len(x))
    assert actual.dtype == dtype
    assert torch.equal(implementation.gather_rows(x, index.int()), with_zeros[index])
    assert torch.equal(implementation.add_rows(grad, index.int(), len(x)), actual)
    assert_close(actual, torch.tensor(sums, dtype=torch.float64).view(x.shape), dtype)


@IMPLEMENTATIONS
def test_repeated_rows_are_added_in_fp32(implementation: ModuleType) -> None:
    """256 + 1 + ... + 1 in bf16 would stay 256."""
    grad = torch.ones(201, 3, dtype=torch.bfloat16)
    grad[0] = 256
    total = implementation.add_rows(grad, torch.zeros(201, dtype=torch.int64), 1)
    assert total.tolist() == [[456.0] * 3]


def test_view_of_a_padded_buffer() -> None:
    x, index, _ = inputs(63, 8, 500, torch.float32)
    rows = padded_index_gather(x.requires_grad_(), index.clamp(min=0))
    assert torch.equal(rows, x[index.clamp(min=0)])
    assert rows.untyped_storage().nbytes() == 1024 * 8 * 4
    buffer = rows.detach().as_strided((1024, 8), (8, 1))
    assert (buffer[500:] == 0).all()
    assert padded_index_gather(x, index[:7], 4).untyped_storage().nbytes() == 8 * 8 * 4
    unchecked = padded_index_gather(x, index, 1, checked=False)
    assert torch.equal(unchecked, padded_index_gather(x, index, 1))
    assert unchecked.untyped_storage().nbytes() == 500 * 8 * 4
    (rows.mul_(2)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.sum(0), torch.full((8,), 1000.0))


def test_gradients() -> None:
    x, index, _ = inputs(5, 3, 11, torch.float64)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: padded_index_gather(t, index, 4), (x,))
    assert torch.autograd.gradcheck(lambda t: padded_index_gather(t, index[:0], 4), (x,))


def test_only_indices_are_saved() -> None:
    x, index, _ = inputs(63, 8, 500, torch.float32)
    x.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        padded_index_gather(x, index)
    assert [t.shape for t in saved] == [(500,)]


def test_errors_name_value_and_constraint() -> None:
    x, index, _ = inputs(5, 3, 4, torch.float32)
    for error, words, arguments in (
        (TypeError, r"x is torch.int64.*floating", (x.long(), index)),
        (TypeError, r"index is torch.int16.*int64 or torch.int32", (x, index.short())),
        (ValueError, r"index \(4, 1\)", (x, index.unsqueeze(1))),
        (ValueError, "meta", (x, index.to("meta"))),
    ):
        with pytest.raises(error, match=words):
            op.validate(*arguments, 1)
    with pytest.raises(ValueError, match="pad_to_multiple=0"):
        padded_index_gather(x, index, 0)
    for wrong in (5, -2):
        index[2] = wrong
        with pytest.raises(ValueError, match=rf"index holds {wrong}: .*\[-1, 5\)"):
            padded_index_gather(x, index)


def test_the_adjoint_is_without_autograd() -> None:
    _, index, grad = inputs(5, 3, 4, torch.float32)
    assert not op.add_rows(grad.requires_grad_(), index, 5).requires_grad
