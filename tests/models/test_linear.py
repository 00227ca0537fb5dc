"""`Linear`, whose weight gradients can be put off, is torch's layer to the bit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lather.models.gated_mlp import GatedMLP
from lather.models.layers import Linear, project
from lather.models.saving.weight_gradients import (
    WeightGradients,
)
from models.tiny import deferring, random_normal

T, D, F_ = 13, 8, 6
PRECISIONS = ("fp32", "fp64", "bf16 autocast")


def autocast(precision: str = "bf16 autocast") -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16 autocast")


@pytest.mark.parametrize("shape", [(63, D), (2, 3, D), (1, D), (0, D), (D,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_linear_layer_is_torchs_to_the_bit(
    precision: str, bias: bool, shape: tuple[int, ...]
) -> None:
    """Gradients of weights under autocast are the exception: torch rounds them to bf16."""
    ours, theirs = Linear(D, 5, bias=bias), nn.Linear(D, 5, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    x = random_normal(*shape)
    if precision == "fp64":
        ours, theirs = ours.double(), theirs.double()
    else:
        x = x.float()
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with autocast(precision):
            y = layer(leaf)
        (y.to(x.dtype) * (1 + torch.arange(y.numel()).view(y.shape))).sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    assert all(a.dtype == b.dtype for a, b in zip(*results, strict=True))
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        if number < 2 or precision != "bf16 autocast":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=2**-8 * float(b.abs().max()))


def test_a_linear_layers_gradients_are_those_of_finite_differences() -> None:
    layers = [Linear(D, 3).double(), Linear(D, 4, bias=False).double()]
    parameters = [p for layer in layers for p in layer.parameters()]
    x = random_normal(5, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: project(x, *layers), (x, *parameters))


def test_gradients_of_a_shared_input_are_added_in_its_own_dtype() -> None:
    """An output that nobody reads adds nothing."""
    layers, x = [Linear(D, 40, bias=False) for _ in range(4)], torch.randn(63, D)
    grads = []
    for together in (True, False):
        leaf = x.clone().requires_grad_()
        with autocast():
            x_ = leaf * 1  # of a leaf, autocast keeps one copy and adds up in bf16
            outputs = [F.linear(x_, layer.weight) for layer in layers]
            if together:
                outputs = project(x_, *layers)
        sum((i + 1) * y.float().square().sum() for i, y in enumerate(outputs[:3])).backward()
        grads.append(leaf.grad)
    # sums of the same bf16 products; sums in bf16 are off by 4e-3
    assert (grads[0] - grads[1]).abs().max() < 1e-6 * grads[1].abs().max()
    assert layers[3].weight.grad is None


def test_a_layer_of_another_kind_is_called_as_it_is() -> None:
    x, layers = torch.randn(3, D), (Linear(D, 2), nn.Linear(D, 3))
    for y, layer in zip(project(x, *layers), layers, strict=True):
        assert torch.equal(y, layer(x))
    assert list(layers[0].state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("kind", ["Linear", "GatedMLP"])
def test_on_the_meta_device(kind: str) -> None:
    with torch.device("meta"):
        module, x = Linear(D, D) if kind == "Linear" else GatedMLP(D, F_), torch.empty(T, D)
        queue = deferring(module)
        module(x).sum().backward()
        WeightGradients.run(queue.take())
    assert all(p.grad.is_meta for p in module.parameters())
