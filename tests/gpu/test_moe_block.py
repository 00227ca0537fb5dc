"""The MoE layer on CUDA in bf16 against the CPU in fp32, in every memory mode, without waiting for
the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU, Gate
from lather.models.experts import Experts
from lather.models.gated_mlp import GatedMLP
from lather.models.moe import MoE
from lather.models.routing import Router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

D, E, K, F = 256, 12, 3, 128
LAYERS = {"swiglu": (SWIGLU, False), "clamped, biases": (CLAMPED_SWIGLU, True)}


def layer(gate: Gate, bias: bool, memory: str = "saved") -> MoE:
    moe = MoE(
        Router(D, E, K, normalize=True, bias=bias),
        Experts(E, D, F, gate=gate, bias=bias),
        GatedMLP(D, F),
    )
    generator = torch.Generator().manual_seed(0)
    for p in moe.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    for module in moe.modules():
        if isinstance(module, Experts | GatedMLP):
            module.memory = memory
    return moe


def results(moe: MoE, x_TD: Tensor) -> dict[str, Tensor]:
    """Return output and gradients with fixed routing, so that a near-tie cannot turn into another
    choice."""
    forced = (
        torch.stack(
            [
                torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K]
                for t in range(len(x_TD))
            ]
        )
        if len(x_TD)
        else None
    )
    forced = torch.zeros(0, K, dtype=torch.int64) if forced is None else forced
    x_TD = x_TD.detach().requires_grad_()
    with moe.gate.replay(forced.to(x_TD.device)):
        y_TD, _ = moe(x_TD)
    grads = torch.autograd.grad(y_TD.float().square().sum(), (x_TD, *moe.parameters()))
    names = ("x", *(name for name, _ in moe.named_parameters()))
    return {"y": y_TD.detach(), **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("memory", ["saved", "recompute", "reference"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tokens", [0, 1, 63, 500])
def test_bf16_on_cuda_is_the_cpus_fp32_within_rounding(name: str, memory: str, tokens: int) -> None:
    x_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(1))
    expected = results(layer(*LAYERS[name], memory="reference"), x_TD)
    actual = results(
        layer(*LAYERS[name], memory=memory).to("cuda", torch.bfloat16),
        x_TD.to("cuda", torch.bfloat16),
    )
    for key, value in expected.items():
        difference = (actual[key].float().cpu() - value).norm()
        assert difference <= 3e-2 * value.norm() + 1e-6, key


@pytest.mark.parametrize("memory", ["saved", "recompute"])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_and_backward_do_not_wait_for_the_device(name: str, memory: str) -> None:
    moe = layer(*LAYERS[name], memory=memory).to("cuda", torch.bfloat16)
    x_TD = torch.randn(500, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moe(x_TD)[0].sum().backward()  # this compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y_TD, routing = moe(x_TD)
        (y_TD.sum() + routing.balance_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
