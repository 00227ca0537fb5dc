"""Which kind of device something is on, and the module of torch that drives it.

Lather tells two kinds apart. On the CPU work is done when a call returns, and to look at a value costs nothing. On a GPU work is queued on
streams, and a look at a value waits for all of it. Every device but the CPU and `meta`, which has no memory, counts as a GPU: CUDA's, and
devices that are registered with torch (`torch.utils.rename_privateuse1_backend`), such as the stand-in that counts launches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor


def is_gpu(on: Tensor | torch.device) -> bool:
    """Whether a tensor is on a GPU, or a device is one."""
    device = on.device if isinstance(on, Tensor) else on
    return device.type not in ("cpu", "meta")


def gpu_module(on: Tensor | torch.device) -> Any:
    """`torch.cuda`, or what another kind of GPU has in its place: streams, events, memory counts, `synchronize`."""
    return torch.get_device_module(on.device if isinstance(on, Tensor) else on)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, if x is not there. To a GPU it goes from pinned memory, and the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if is_gpu(device) and x.device.type == "cpu" else x.to(device)


def launching_on(x: Tensor) -> AbstractContextManager[object]:
    """The GPU of `x`, if it is on one, as the current one: Triton launches on that, whatever its arguments say."""
    return cast(AbstractContextManager[object], gpu_module(x).device_of(x)) if is_gpu(x) else nullcontext()
