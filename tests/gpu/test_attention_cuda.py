"""Attention on a CUDA device, through the fused kernels and compiled flex attention, against the
CPU's in fp64, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lather.models import fused_attention
from lather.models.attention_kernels import attend
from lather.models.fused_attention import Case, Form, candidates
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


NARROW, HALF, FULL = (10, 10), torch.bfloat16, torch.float32
LATENT, ALIKE = (192, 128), (64, 64)


@pytest.mark.parametrize(
    ("dtype", "widths", "packed", "window", "has_sinks"),
    [
        # fused kernels: torch's choice, values as they are, groups without and with a kernel that
        # takes them, widths that no kernel takes
        (HALF, ALIKE, False, None, False),
        (HALF, LATENT, False, None, False),
        (FULL, ALIKE, False, None, False),
        (FULL, LATENT, False, None, False),
        (HALF, NARROW, False, None, False),
        # masks, and a sink as a token, where heads are too narrow for flex attention
        (HALF, NARROW, True, 100, False),
        (FULL, NARROW, True, 100, True),
        (FULL, NARROW, False, None, True),
        # flex attention: each kind of mask and sinks; small tiles
        (HALF, ALIKE, False, 100, True),
        (HALF, ALIKE, False, None, True),
        (HALF, LATENT, True, None, False),
        (HALF, ALIKE, True, 100, True),
        (FULL, LATENT, True, 1, False),
    ],
    ids=str,
)
def test_cuda_agrees_with_the_cpu(
    dtype: torch.dtype, widths: tuple[int, int], packed: bool, window: int | None, has_sinks: bool
) -> None:
    case = {"packed": packed, "window": window, "has_sinks": has_sinks, "widths": widths}
    assert_agree(run("cuda", dtype, **case), run("cpu", torch.float64, **case), dtype)


def assert_agree(actual: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, expected in exact.items():
        assert actual[name].isfinite().all()
        error = (actual[name] - expected).abs().max() / expected.abs().max().clamp(min=0.1)
        assert error < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_every_form_that_a_kernel_takes_agrees(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention in all its forms: with values as they are and padded, and without cuDNN; at
    least one passes its trial."""
    options = {"packed": False, "window": None, "has_sinks": False, "widths": LATENT}
    exact, agreeing = run("cpu", torch.float64, **options), []

    def remembered(case: Case) -> Form:
        cases.append(case)
        return forms[0]

    cases: list[Case] = []
    forms = [Form(cudnn=False)]
    monkeypatch.setattr(fused_attention, "form_of", remembered)
    assert_agree(run("cuda", dtype, **options), exact, dtype)
    for kernel, form in candidates(cases[0]):
        if cases[0].chosen(form) == kernel and cases[0].runs(form):
            forms[0] = form
            assert_agree(run("cuda", dtype, **options), exact, dtype)
            agreeing.append((kernel, form))
    assert agreeing, cases[0]


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
