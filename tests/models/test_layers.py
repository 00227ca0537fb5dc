"""RMSNorm and the gradients of weights against their formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.implementations import WideProducts
from lather.models import layers
from lather.models.gated_mlp import GatedMLP
from lather.models.layers import Linear, RMSNorm, project, weight_product
from models.tiny import error, random_normal


def test_rms_norm_is_its_formula_and_squares_in_fp32() -> None:
    """1000^2 is beyond fp16's range."""
    norm = RMSNorm(5, eps=0.3).double()
    torch.nn.init.uniform_(norm.weight, -2, 2, generator=torch.Generator().manual_seed(0))
    x = random_normal(6, 5)
    rows = torch.stack([row / math.sqrt((row @ row).item() / 5 + 0.3) for row in x])
    assert error(norm(x), rows * norm.weight) < 1e-14
    narrow = torch.tensor([[1000.0, -1000.0, 1000.0, 1000.0]], dtype=torch.float16)
    normed = RMSNorm(4, eps=1e-6).half()(narrow)
    assert normed.dtype == torch.float16
    assert normed.tolist() == [[1, -1, 1, 1]]


def test_a_zero_centered_norm_begins_as_the_other_and_adds_1_in_fp32() -> None:
    x, weight = random_normal(6, 5), random_normal(5, seed=1) * 2**-12
    norm, other = RMSNorm(5, eps=0.3, zero_centered=True), RMSNorm(5, eps=0.3)
    assert torch.equal(norm(x.float()), other(x.float()))
    fresh = norm.fresh_parameter("weight", norm.weight, None)
    assert torch.equal(fresh, norm.weight)
    norm.weight.data, other.weight.data = weight.bfloat16(), 1 + weight.bfloat16().double()
    y = norm(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, other(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize(
    ("operands", "weight", "tolerance"),
    [
        (torch.bfloat16, torch.float32, 1e-6),
        (torch.float16, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 4e-3),
        (torch.float32, torch.bfloat16, 1e-6),
        (torch.float32, torch.float64, 1e-14),
    ],
    ids=str,
)
def test_a_weights_gradient_is_added_up_in_the_wider_dtype(
    operands: torch.dtype, weight: torch.dtype, tolerance: float
) -> None:
    """The gradient is that of the rounded operands; x is rounded to the gradient's dtype."""
    grad, x = random_normal(500, 7).to(operands), random_normal(500, 11, seed=1)
    product = weight_product(grad, x, weight)
    expected = grad.double().T @ x.to(operands).double()
    assert product.dtype == torch.promote_types(operands, weight)
    assert error(product, expected) < tolerance
    assert error(1.01 * product.double(), expected) > tolerance


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_a_weights_gradient_is_added_to_a_sum_by_its_kernel(
    operands: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU leaves the sum alone."""
    grad, x = random_normal(500, 7).to(operands), random_normal(500, 11, seed=1).to(operands)
    total = before = random_normal(7, 11, seed=2).float()
    exact = before.double() + grad.double().T @ x.double()
    alone = weight_product(grad, x, torch.float32, total)
    assert alone is not total
    assert total.equal(random_normal(7, 11, seed=2).float())
    monkeypatch.setattr(layers, "is_gpu", lambda x: True)
    with WideProducts() as products:
        assert weight_product(grad, x, torch.float32, total) is total
        assert weight_product(grad, x, torch.float32).equal(alone)
    assert error(total, exact) < 1e-6
    kernel = "addmm_" if operands == torch.float32 else "addmm.dtype_out"
    assert products.calls[kernel] == 1
    assert not products.calls["add_.Tensor"]


def test_under_autocast_gradients_of_fp32_weights_and_biases_are_not_rounded_to_bf16() -> None:
    linear, x = Linear(11, 7), random_normal(500, 11).float()
    cotangent = random_normal(500, 7, seed=1).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    y.backward(cotangent)
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    assert error(linear.weight.grad, cotangent.double().T @ x.bfloat16().double()) < 1e-6
    assert error(linear.bias.grad, cotangent.double().sum(0)) < 1e-6

    mlp = GatedMLP(11, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x)
    y.backward(random_normal(500, 11, seed=2).bfloat16())
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        gradient = layer.weight.grad
        assert gradient is not None
        assert (gradient != gradient.bfloat16()).float().mean() > 0.9


def test_on_a_gpu_gradients_of_an_fp32_input_are_added_without_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each product is added in its own kernel; nothing is converted or added in a pass of its
    own."""
    linears = [Linear(11, size, bias=False) for size in (7, 5, 3)]
    x = random_normal(63, 11).float().requires_grad_()
    grads = [random_normal(63, size, seed=size).bfloat16() for size in (7, 5, 3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = project(x, *linears)
    monkeypatch.setattr(layers, "is_gpu", lambda x: True)
    with WideProducts() as products:
        (grad_x,) = torch.autograd.grad(outputs, x, grads)
    exact = sum(
        grad.double() @ layer.weight.bfloat16().double()
        for grad, layer in zip(grads, linears, strict=True)
    )
    assert grad_x.dtype == torch.float32
    assert error(grad_x, exact) < 1e-6
    assert products.calls["mm.dtype"] == 1 + len(linears)  # those of the weights are single
    assert products.calls["addmm.dtype_out"] == 2
    assert not products.calls["add_.Tensor"]
