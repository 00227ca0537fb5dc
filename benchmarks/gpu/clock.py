"""Times work on a device, and measures its rates: by events on a GPU, by the clock on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.measure import percentiles
from lather.device import gpu_module, is_gpu, stated_peak_flops

WARM_UP = 3


@dataclass(frozen=True)
class DeviceRates:
    """The rates that the device reaches in this process; everything else is measured against
    them."""

    bytes: float
    """Bytes per second of a device copy, counting bytes read and bytes written."""
    flops: float
    """Flops per second of a large bf16 matrix product."""


def milliseconds(
    work: Callable[[], object],
    device: torch.device,
    rounds: int,
    warm_up: int = WARM_UP,
    in_a_row: int = 1,
) -> dict[str, float]:
    """Time `rounds` times `in_a_row` calls on a GPU, one call on a CPU, after `warm_up` calls that
    compile and warm up; returns median, p20 and p80 of a call.

    A GPU waits for the first of the calls, while the host prepares it; with several in a row it
    works on one while the host prepares the next, as in training.
    """
    for _ in range(warm_up):
        work()
    return percentiles([_time(work, device, in_a_row) for _ in range(rounds)])


def _time(work: Callable[[], object], device: torch.device, in_a_row: int) -> float:
    if not is_gpu(device):
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    gpu = gpu_module(device)
    start, end = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
    gpu.synchronize(device)
    start.record()
    for _ in range(in_a_row):
        work()
    end.record()
    gpu.synchronize(device)
    return float(start.elapsed_time(end)) / in_a_row


def measure_rates(device: torch.device, *, small: bool) -> DeviceRates:
    """Measure a copy of 1 GiB and a product of 8192 x 8192 matrices; much smaller ones if
    `small`."""
    source = torch.zeros(2**20 if small else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 128 if small else 8192
    x, y = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    copy, product = (
        milliseconds(work, device, 10)["median"]
        for work in (lambda: target.copy_(source), lambda: x @ y)
    )
    return DeviceRates(2e3 * source.nbytes / copy, 2e3 * n**3 / product)


def peak_flops(device: torch.device, rates: DeviceRates) -> tuple[float, str]:
    """Return the device's dense bf16 flops per second, and whether its maker states them or the
    product above was measured."""
    stated = stated_peak_flops(device)
    if stated is None:
        return rates.flops, "measured matrix product"
    peak, name = stated
    return peak, f"stated for {name}"
