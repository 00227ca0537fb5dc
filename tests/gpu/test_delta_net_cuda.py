"""Gated DeltaNet on a CUDA device against fp64 on the CPU: in fp32 by torch's operations, in bf16
also by fla's kernels if they are installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

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
