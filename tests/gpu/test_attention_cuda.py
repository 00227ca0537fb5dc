"""Attention on a CUDA device, through the fused kernels and compiled flex attention, against the
CPU's in fp64, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lather.models.attention import attend
from lather.models.token_positions import SequenceLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

B, H, G = 2, 6, 2
PACKED = [0, 70, 71, 71, 300, 500, 1000]
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


def run(
    device: str,
    dtype: torch.dtype,
    *,
    packed: bool,
    window: int | None,
    has_sinks: bool,
    widths: tuple[int, int],
    length: int = 500,
) -> dict[str, Tensor]:
    """Return output and gradients, in fp64 on the CPU."""
    width, value_width = widths
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "q": (B, length, H, width),
        "k": (B, length, G, width),
        "v": (B, length, G, value_width),
        "sinks": (H,),
    }
    inputs = {
        name: torch.randn(shape, generator=draw).to(dtype).to(device).requires_grad_()
        for name, shape in shapes.items()
    }
    cotangent = torch.randn(B, length, H, value_width, generator=draw).to(dtype).to(device)
    layout = SequenceLayout(
        B, length, torch.device(device), torch.tensor(PACKED, device=device) if packed else None
    )
    q, k, v, sinks = inputs.values()
    if not has_sinks:
        del inputs["sinks"]
    y = attend(q, k, v, layout, window=window, sinks_H=sinks if has_sinks else None)
    grads = torch.autograd.grad(y, list(inputs.values()), cotangent)
    results = {"y": y.detach(), **dict(zip(inputs, grads, strict=True))}
    return {name: result.double().cpu() for name, result in results.items()}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Reset the compiler, because these tests compile more kinds of masks than one process may."""
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (10, 10)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
def test_cuda_agrees_with_the_cpu(
    dtype: torch.dtype, widths: tuple[int, int], packed: bool, window: int | None, has_sinks: bool
) -> None:
    case = {"packed": packed, "window": window, "has_sinks": has_sinks, "widths": widths}
    actual, exact = run("cuda", dtype, **case), run("cpu", torch.float64, **case)
    for name, expected in exact.items():
        assert actual[name].isfinite().all()
        error = (actual[name] - expected).abs().max() / expected.abs().max().clamp(min=0.1)
        assert error < TOLERANCE[dtype], name


def test_windows_and_documents_take_no_memory_that_is_quadratic_in_the_length() -> None:
    length = 16384
    q = torch.randn(1, length, 2, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the first pass compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layout = SequenceLayout(1, length, q.device, torch.tensor([0, 5000, length]))
        attend(q, q, q, layout, window=128, sinks_H=torch.zeros(2, device="cuda"))
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < length**2 / 4
