"""Measures rates of a rank's device: bytes per second of a copy, and flops per second of products
of large matrices in the dtypes that runs use (`lather.time_model.measured`).

Ranks measure at about the same time, so that those which share a memory share its rate, as in a
run.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lather.device import gpu_module, is_gpu
from lather.files import read_text
from lather.time_model.measured import MeasuredRates
from lather.torch_private import get_fp32_precision, set_fp32_precision

COPY_BYTES = {"cpu": 24 * 2**20, "gpu": 512 * 2**20}
"""Bytes that are copied: more than most caches hold, and on a CPU not so many that the copy is
memory that the system has to clear first."""
ROWS = {"cpu": 512, "gpu": 8192}
"""Rows and columns of the matrices that are multiplied."""
REPEATS, SECONDS = 5, 0.02
"""Measurements, of which the shortest counts, and the least duration of each."""


def measure_rates(device: torch.device) -> MeasuredRates:
    """Measure the rates of a device, in two seconds or so on a CPU and less on a GPU."""
    kind = "gpu" if is_gpu(device) else "cpu"
    x = torch.ones(COPY_BYTES[kind] // 4, device=device)
    copy = 2 * x.nbytes / _seconds(x.clone, device)
    del x
    a = torch.randn(ROWS[kind], ROWS[kind], device=device)
    b, narrow = torch.randn_like(a), a.bfloat16()

    def flops(left: Tensor, right: Tensor) -> float:
        return 2 * ROWS[kind] ** 3 / _seconds(lambda: left @ right, device)

    with _precision("ieee"):
        fp32 = flops(a, b)
    tf32 = fp32
    if is_gpu(device):
        with _precision("tf32"):
            tf32 = flops(a, b)
    name = gpu_module(device).get_device_name(device) if is_gpu(device) else processor_name()
    threads = 0 if is_gpu(device) else torch.get_num_threads()
    return MeasuredRates(name, threads, copy, fp32, tf32, flops(narrow, b.bfloat16()))


def _seconds(operation: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of an operation: the shortest of some measurements, each of as many calls
    as take `SECONDS`. On a CPU these are seconds of this thread, which works and spins with the
    others: other programs do not count."""
    clock = time.perf_counter if is_gpu(device) else time.thread_time

    def measured(calls: int) -> float:
        start = clock()
        for _ in range(calls):
            operation()
        if is_gpu(device):
            gpu_module(device).synchronize(device)
        return max(clock() - start, 1e-9) / calls

    measured(1)  # libraries are loaded
    calls = max(1, round(SECONDS / measured(1)))
    return min(measured(calls) for _ in range(REPEATS))


@contextmanager
def _precision(value: str) -> Iterator[None]:
    """Set the precision of products in fp32 on CUDA devices inside the block."""
    before = get_fp32_precision("cuda", "matmul")
    set_fp32_precision("cuda", "matmul", value)
    try:
        yield
    finally:
        set_fp32_precision("cuda", "matmul", before)


def processor_name() -> str:
    """Return the name of the processor, or its architecture where the system does not tell."""
    try:
        lines = read_text(Path("/proc/cpuinfo")).splitlines()
    except (OSError, UnicodeError):
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()
