"""Which kind of device something is on, and the module of torch that drives it.

Lather tells two kinds apart. On the CPU work is done when a call returns, and to look at a value costs nothing. On a GPU work is queued on
streams, and a look at a value waits for all of it. Every device but the CPU and `meta`, which has no memory, counts as a GPU: CUDA's, and
devices that are registered with torch (`torch.utils.rename_privateuse1_backend`), such as the stand-in that counts launches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.utils.deterministic
from torch import Tensor

CPU_STANDIN = "cpu_standin"
"""Name under which the stand-in device (`lather.standin`) is registered where it stands for a CPU."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable without which cuBLAS may take another kernel in the next run."""


def is_gpu(on: Tensor | torch.device) -> bool:
    """Whether a tensor is on a GPU, or a device is one."""
    device = on.device if isinstance(on, Tensor) else on
    return device.type not in ("cpu", "meta", CPU_STANDIN)


def is_cpu(on: Tensor | torch.device) -> bool:
    """Whether a tensor is on the CPU, or a device is the CPU."""
    device = on.device if isinstance(on, Tensor) else on
    return device.type in ("cpu", CPU_STANDIN)


def gpu_module(on: Tensor | torch.device) -> Any:
    """`torch.cuda`, or what another kind of GPU has in its place: streams, events, memory counts, `synchronize`."""
    return torch.get_device_module(on.device if isinstance(on, Tensor) else on)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, if x is not there. To a GPU it goes from pinned memory, and the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if is_gpu(device) and x.device.type == "cpu" else x.to(device)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products in the dtypes that they are given, also inside a caller's autocast block. There is no autocast on the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def launching_on(x: Tensor) -> AbstractContextManager[object]:
    """The GPU of `x`, if it is on one, as the current one: Triton launches on that, whatever its arguments say."""
    return cast(AbstractContextManager[object], gpu_module(x).device_of(x)) if is_gpu(x) else nullcontext()


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Inside the block, if `enabled`, operations give the same bits each time; torch warns of those for which it has no such kernel.

    To be entered before the first product on a GPU: cuBLAS reads its workspaces' sizes once. Nothing is changed without `enabled`.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    options: Any = torch.utils.deterministic
    fill, workspace = options.fill_uninitialized_memory, os.environ.get(CUBLAS_WORKSPACE)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        options.fill_uninitialized_memory = False  # what is not written is not read here
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        options.fill_uninitialized_memory = fill
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE]
