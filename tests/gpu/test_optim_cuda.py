"""The optimizers on a CUDA device: the same numbers as on the CPU, whatever the streams, and no waiting for the device per parameter."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lather.optim import KLSOAP, SOAP, MatrixOptimizer, StackedSOAP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(64, 128)] * 6 + [(4, 48, 32), (64,), (70, 33), (70, 33)]


def trained(cls: type[MatrixOptimizer], device: str, steps: int = 8, **options: Any) -> tuple[list[torch.Tensor], MatrixOptimizer]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    optimizer = cls(params, lr=1e-2, adam_warmup_steps=3, precondition_frequency=2, second_moment="rotate", **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params], optimizer


@pytest.mark.parametrize("cls", [SOAP, KLSOAP, StackedSOAP], ids=["SOAP", "KLSOAP", "StackedSOAP"])
@pytest.mark.parametrize("options", [{}, {"refresh_method": "qr"}, {"refresh_method": "cholesky_qr"}, {"num_streams": 3}], ids=str)
def test_cuda_agrees_with_the_cpu(cls: type[MatrixOptimizer], options: dict[str, Any]) -> None:
    on_cuda, _ = trained(cls, "cuda", **options)
    on_cpu, _ = trained(cls, "cpu", **options)
    for p, expected in zip(on_cuda, on_cpu, strict=True):
        torch.testing.assert_close(p, expected, rtol=0, atol=2e-4)


def test_the_device_is_waited_for_a_fixed_number_of_times_per_step() -> None:
    def waits(num: int) -> int:
        params = [torch.nn.Parameter(torch.randn(48, 64, device="cuda")) for _ in range(num)]
        optimizer = SOAP(params, precondition_frequency=1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            optimizer.step()
        return sum(
            event.count for event in profiler.key_averages() if event.key in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
        )

    assert waits(4) == waits(64)


def test_temporary_memory_keeps_to_the_bound() -> None:
    params = [torch.nn.Parameter(torch.randn(256, 512, device="cuda")) for _ in range(32)]
    optimizer = SOAP(params, precondition_frequency=1, bucket_bytes=2**25)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 2**25
