"""Gated DeltaNet on a CUDA device against fp64 on the CPU: in fp32 by torch's operations, in bf16
also by fla's kernels if they are installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from kernels.test_gated_delta_rule_slices import in_slices
from lather.kernels.gated_delta_rule import Documents, gated_delta_rule
from lather.models.delta_net import DeltaSizes, GatedDeltaNet
from lather.models.token_positions import SequenceLayout
from models.tiny import error, random_normal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FLA = importlib.util.find_spec("fla") is not None


def results(layer: GatedDeltaNet, device: str, dtype: torch.dtype, packed: bool) -> list[Tensor]:
    """Return the output, and the gradients of the input and of every parameter, in fp64."""
    layer = layer.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    weight = layer.out_proj.weight
    x_BSD = random_normal(2, 200, 64).to(weight).requires_grad_()
    bounds = torch.tensor([0, 3, 77, 200, 333, 400]) if packed else None
    layout = SequenceLayout(2, 200, weight.device, bounds)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        y_BSD = layer(x_BSD, layout)
    total = (y_BSD.to(weight.dtype) * random_normal(2, 200, 64, seed=1).to(weight)).sum()
    found = [y_BSD, *torch.autograd.grad(total, [x_BSD, *layer.parameters()])]
    return [x.detach().double().cpu() for x in found]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 5e-4),
        pytest.param(torch.bfloat16, 0.15, id="bf16, with fla" if FLA else "bf16, without fla"),
    ],
)
def test_a_gpu_computes_what_the_cpu_does(
    dtype: torch.dtype, tolerance: float, packed: bool
) -> None:
    layer = GatedDeltaNet(DeltaSizes(64, 2, 4, 64, 64, 4), 1e-2, grouped_projections=True)
    generator = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    expected = results(layer, "cpu", torch.float64, packed)
    for x, y in zip(results(layer, "cuda", dtype, packed), expected, strict=True):
        assert error(x, y) < tolerance


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 0.15)])
def test_states_pass_between_slices_on_a_gpu(
    dtype: torch.dtype, tolerance: float, packed: bool
) -> None:
    """In four slices; a document begins with one of them."""
    sizes = [(2, 64), (2, 64), (4, 64), (4,), (4,)]
    tokens = [random_normal(2, 512, *size, seed=seed) for seed, size in enumerate(sizes)]
    tokens[3:] = -tokens[3].abs() / 10, tokens[4].sigmoid()
    number_BT = (torch.arange(512) >= 128).long() + (torch.arange(512) >= 300).long()
    number_BT = torch.stack((number_BT, number_BT + 3))
    results = []
    for device, its_dtype in (("cpu", torch.float64), ("cuda", dtype)):
        inputs = [
            x.to(device, its_dtype if number < 3 or its_dtype == torch.float64 else torch.float32)
            for number, x in enumerate(tokens)
        ]
        inputs = [x.requires_grad_() for x in inputs]
        numbers = number_BT.to(device) if packed else None
        if device == "cpu":
            out, _ = gated_delta_rule(*inputs, None if numbers is None else Documents(numbers))
        else:
            out = in_slices(inputs, 4, numbers)
        weights = random_normal(*out.shape, seed=7).to(out)
        grads = torch.autograd.grad((out * weights).sum(), inputs)
        results.append([x.detach().double().cpu() for x in (out, *grads)])
    for x, y in zip(*reversed(results), strict=True):
        assert error(x, y) < tolerance
