"""RMSNorm against the formula under autograd; the Triton kernels, in the interpreter, against the
reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, assert_close, on_each
from lather.kernels.rms_norm import reference, rms_norm, validate

try:
    from lather.kernels.rms_norm import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
EPS = 1e-3
SHAPES = [(63, 33), (5, 2100), (3, 1), (1, 500), (1100, 4), (0, 8)]


def inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x, whose rows differ much in length, the weight and the gradient of y."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 2, rows).unsqueeze(1)
    wide = torch.promote_types(dtype, torch.float32)
    weight = torch.rand(columns, generator=generator).to(wide) + 0.5
    return x.to(dtype), weight, torch.randn(rows, columns, generator=generator).to(wide)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_against_autograd_of_the_formula(
    implementation: ModuleType, shape: tuple[int, int]
) -> None:
    x, weight, grad = inputs(*shape, torch.float64)
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = plain(leaf, leaf_weight)
    y, inverse_rms = implementation.forward(x, weight, EPS)
    assert inverse_rms.shape == (shape[0], 1)
    assert_close(y, expected.detach(), torch.float64)
    gradients = torch.autograd.grad(expected, (leaf, leaf_weight), grad)
    backward = implementation.backward(grad, x, weight, inverse_rms)
    for actual, right in zip(backward, gradients, strict=True):
        assert_close(actual, right, torch.float64)


@INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_against_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A bf16 x with a weight in fp32 gives fp32, as under autocast."""
    x, weight, grad = inputs(*shape, dtype)
    expected, inverse_rms = reference.forward(x, weight, EPS)
    actual, actual_inverse_rms = triton.forward(x, weight, EPS)
    for result in (actual, actual_inverse_rms, expected, inverse_rms):
        assert result.dtype == torch.float32
    assert_close(actual, expected, dtype)
    assert_close(actual_inverse_rms, inverse_rms, torch.float32)
    gradients = (m.backward(grad, x, weight, inverse_rms) for m in (triton, reference))
    for of_triton, of_reference in zip(*gradients, strict=True):
        assert of_triton.dtype == of_reference.dtype
        assert_close(of_triton, of_reference, dtype)


@INTERPRETER
def test_runs_of_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs do several tiles each, and the last tile is not full."""
    x, weight, grad = inputs(101, 30, torch.float32)
    _, inverse_rms = reference.forward(x, weight, EPS)
    monkeypatch.setattr(triton, "TILE", 64)
    monkeypatch.setattr(triton, "PROGRAMS", 6)
    gradients = (m.backward(grad, x, weight, inverse_rms) for m in (triton, reference))
    for of_triton, of_reference in zip(*gradients, strict=True):
        assert_close(of_triton, of_reference, torch.float32)


@IMPLEMENTATIONS
def test_other_layouts(implementation: ModuleType) -> None:
    """Layouts with more dims, part of wider rows, transposed rows, and a gradient that repeats one
    row."""
    x, weight, grad = inputs(30, 40, torch.float32)
    narrow = weight[:24]
    for part, of_y in (
        (x.view(5, 6, 40)[..., 8:32], grad.view(5, 6, 40)[..., :24]),
        (x[:24].t().contiguous().t()[:, :24], grad[:24, :24].t()),
        (x[:, :24], grad[:1, :24].expand(30, 24)),
    ):
        y, inverse_rms = implementation.forward(part, narrow, EPS)
        expected, _ = reference.forward(part.contiguous(), narrow, EPS)
        torch.testing.assert_close(y, expected)
        gradients = implementation.backward(of_y, part, narrow, inverse_rms)
        right = reference.backward(of_y.contiguous(), part.contiguous(), narrow, inverse_rms)
        for actual, other in zip(gradients, right, strict=True):
            torch.testing.assert_close(actual, other)


def test_autograd_keeps_its_input_the_weight_and_a_number_per_row() -> None:
    x, weight, grad = inputs(63, 33, torch.bfloat16)
    saved: list[Tensor] = []
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = rms_norm(leaf, leaf_weight, EPS)
    assert sorted(t.numel() for t in saved) == [33, 63, 63 * 33]
    y.backward(grad)
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16


def test_errors_say_the_remedy() -> None:
    with pytest.raises(ValueError, match="one number for each column"):
        validate(torch.zeros(3, 4), torch.zeros(5))
    with pytest.raises(TypeError, match="floating point"):
        validate(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(4))
