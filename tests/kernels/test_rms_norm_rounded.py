"""RMSNorm that adds a branch, writes rows in the dtype of products, and adds all gradients in its
backward pass: against plain autograd of the same formulas, and the kernels, in the interpreter,
against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, assert_close, on_each
from lather.kernels.rms_norm import (
    add_rms_norm,
    narrow_rms_norm,
    reference,
    rms_norm,
    round_rms_norm,
    rounded_again,
    validate,
)

try:
    from lather.kernels.rms_norm import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
EPS = 1e-3
BF16 = torch.bfloat16
SHAPES = [(63, 33), (5, 2100), (3, 1), (1, 500), (1100, 4)]


def draw(rows: int, columns: int, *dtypes: torch.dtype) -> list[Tensor]:
    """Draw a tensor of each dtype, whose rows differ much in length, and a weight."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    length = torch.logspace(-2, 2, rows).unsqueeze(1)
    drawn = [torch.randn(rows, columns, generator=generator) * length for _ in dtypes]
    weight = torch.rand(columns, generator=generator) + 0.5
    return [*(x.to(dtype) for x, dtype in zip(drawn, dtypes, strict=True)), weight]


@INTERPRETER
@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "both"])
@pytest.mark.parametrize("branch_dtype", [None, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_against_the_reference(
    shape: tuple[int, int], branch_dtype: torch.dtype | None, wide: bool
) -> None:
    x, branch, weight = draw(*shape, torch.float32, branch_dtype or BF16)
    arguments = (x, None if branch_dtype is None else branch, weight, EPS, BF16)
    expected = reference.forward_rounded(*arguments, wide=wide)
    actual = triton.forward_rounded(*arguments, wide=wide)
    for number, (of_kernel, right) in enumerate(zip(actual, expected, strict=True)):
        if right is None:
            assert of_kernel is None
            continue
        assert of_kernel.dtype == right.dtype
        assert_close(of_kernel, right, right.dtype)
        assert (number == 0 and branch_dtype is None) == (of_kernel is x)


@IMPLEMENTATIONS
@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("branch_dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_a_narrow_stream_keeps_its_dtype(
    implementation: ModuleType, branch_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, branch, weight = draw(63, 33, BF16, branch_dtype)
    total, y, wide, inverse_rms = implementation.forward_rounded(
        x, branch, weight.to(weight_dtype), EPS, BF16, wide=True
    )
    assert_close(total, (x.float() + branch.float()).to(BF16), BF16)
    assert (total.dtype, y.dtype, wide.dtype) == (BF16, BF16, torch.float32)
    expected = total.float() * inverse_rms * weight.to(weight_dtype)
    for made in (y, wide):
        assert_close(made.float(), expected, BF16)


@INTERPRETER
@pytest.mark.parametrize("branch_dtype", [None, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("passes", [False, True], ids=["alone", "with the stream's"])
@pytest.mark.parametrize("num_grads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_backward_against_the_reference(
    shape: tuple[int, int], num_grads: int, passes: bool, branch_dtype: torch.dtype | None
) -> None:
    dtypes = (BF16, BF16, torch.float32)[-num_grads:]
    x, stream, *grads, weight = draw(*shape, torch.float32, torch.float32, *dtypes)
    inverse_rms = reference.forward(x, weight, EPS)[1]
    rest = (stream if passes else None, x, weight, inverse_rms, branch_dtype)
    expected = reference.backward_rounded(grads, *rest)
    actual = triton.backward_rounded(grads, *rest)
    for of_kernel, right in zip(actual, expected, strict=True):
        if right is None:
            assert of_kernel is None
            continue
        assert of_kernel.dtype == right.dtype
        assert_close(of_kernel, right, right.dtype)


@IMPLEMENTATIONS
def test_slices_transposed_and_repeated_rows(implementation: ModuleType) -> None:
    x, branch, *grads, weight = draw(30, 40, torch.float32, BF16, BF16, torch.float32)
    x, weight = x[:, 8:32], weight[:24]
    branch = branch[:, :24].t().contiguous().t()
    grads = [grads[0][:, 16:], grads[1][:1, :24].expand(30, 24)]
    plain = [x.contiguous(), branch.contiguous()]
    actual = implementation.forward_rounded(x, branch, weight, EPS, BF16, wide=True)
    expected = reference.forward_rounded(*plain, weight, EPS, BF16, wide=True)
    total, inverse_rms = expected[0], expected[3]
    assert total is not None
    for one, right in zip(actual, expected, strict=True):
        assert_close(one, right, right.dtype)
    rest = (weight, inverse_rms, BF16)
    actual = implementation.backward_rounded(grads, x, total, *rest)
    expected = reference.backward_rounded(
        [grad.contiguous() for grad in grads], plain[0], total, *rest
    )
    for one, right in zip(actual, expected, strict=True):
        assert_close(one, right, right.dtype)


@IMPLEMENTATIONS
def test_nan_and_infinity_stay_in_their_rows(implementation: ModuleType) -> None:
    x, branch, grad, weight = draw(9, 20, torch.float32, BF16, BF16)
    branch[2, 3], x[5, 0] = torch.nan, torch.inf
    total, y, wide, inverse_rms = implementation.forward_rounded(
        x, branch, weight, EPS, BF16, wide=True
    )
    for made in (total, y, wide):
        assert (~made.isfinite()).any(-1).nonzero().flatten().tolist() == [2, 5]
    grad[7, 1] = torch.inf
    grad_x, of_branch, _ = implementation.backward_rounded(
        [grad], None, total, weight, inverse_rms, BF16
    )
    for made in (grad_x, of_branch):
        assert (~made.isfinite()).any(-1).nonzero().flatten().tolist() == [2, 5, 7]


def test_values_and_gradients_are_those_of_plain_autograd() -> None:
    """The sum, rounded rows for two readers, rows in fp32 for a third; the gradients of the readers
    are rounded as theirs are, and added in fp32."""
    x, branch, to_stream, to_a, to_b, to_wide, weight = draw(
        63, 33, torch.float32, BF16, torch.float32, BF16, BF16, torch.float32
    )
    expected = [one.clone().requires_grad_() for one in (x, branch, weight)]
    total = expected[0] + expected[1]
    wide = rms_norm(total, expected[2], EPS)
    rows = wide.to(BF16), wide.to(BF16)
    torch.autograd.backward((total, *rows, wide), (to_stream, to_a, to_b, to_wide))
    actual = [one.clone().requires_grad_() for one in (x, branch, weight)]
    outputs = add_rms_norm(*actual, EPS, BF16, copies=2, wide=True)
    assert outputs[1].data_ptr() == outputs[2].data_ptr()
    for one, right in zip(outputs, (total, *rows, wide), strict=True):
        assert one.equal(right)
    torch.autograd.backward(outputs, (to_stream, to_a, to_b, to_wide))
    for one, right in zip(actual, expected, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, right.grad)
    assert rounded_again(total.detach(), weight, EPS, BF16, wide=False)[0].equal(rows[0])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_stand_in_takes_the_gradient_in_fp32(dtype: torch.dtype) -> None:
    x, to_x, to_rows, weight = draw(63, 33, dtype, dtype, torch.float32)
    expected = [one.clone().requires_grad_() for one in (x, weight)]
    wide = rms_norm(*expected, EPS)
    torch.autograd.backward((wide, expected[0]), (to_rows, to_x))
    actual = [one.clone().requires_grad_() for one in (x, weight)]
    same, rows = round_rms_norm(*actual, EPS, BF16)
    assert rows.dtype == torch.float32
    assert rows.values.dtype == BF16
    assert rows.values.equal(wide.to(BF16))
    assert rows.stand_in.untyped_storage().nbytes() == 63 * 4
    assert same.equal(x)
    assert rows.widened().equal(wide.to(BF16).float())
    torch.autograd.backward((rows.widened(), same), (to_rows, to_x))
    for one, right in zip(actual, expected, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, right.grad)


def test_outputs_without_a_gradient() -> None:
    x, branch, grad, weight = draw(7, 5, torch.float32, BF16, torch.float32)
    leaves = [one.requires_grad_() for one in (x, branch, weight)]
    total, *_ = add_rms_norm(*leaves, EPS, BF16, copies=1, wide=True)
    of_x, of_branch, of_weight = torch.autograd.grad(total, leaves, grad, allow_unused=True)
    assert of_x.equal(grad)
    assert of_branch.equal(grad.to(BF16))
    assert of_weight is None


def test_a_branch_of_another_shape_is_refused() -> None:
    x, branch, weight = draw(6, 8, torch.float32, BF16)
    with pytest.raises(ValueError, match=r"branch has shape \(5, 8\) with x \(6, 8\)"):
        validate(x, weight, branch[:5])


@pytest.mark.parametrize("copies", [0, 3])
def test_other_numbers_of_copies_are_refused(copies: int) -> None:
    x, branch, weight = draw(6, 8, torch.float32, BF16)
    with pytest.raises(ValueError, match=f"copies is {copies}: has to be 1 or 2"):
        add_rms_norm(x, branch, weight, EPS, BF16, copies=copies, wide=True)


def test_a_narrow_output_and_its_gradient_are_those_of_plain_autograd() -> None:
    """The output of a norm that travels, which is rounded, and takes its gradient as it is."""
    x, grad, weight = draw(63, 33, BF16, BF16)
    results = []
    for norm in (rms_norm, lambda x, w, eps: narrow_rms_norm(x, w, eps, BF16)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = norm(*leaves, EPS).to(BF16)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for actual, expected in zip(*results, strict=True):
        assert actual.equal(expected)
    assert narrow_rms_norm(x, weight, EPS, BF16).dtype == BF16
