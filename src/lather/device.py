"""Distinguishes CPU and GPU, returns the module of torch that drives a GPU, and reads values from a
device.

On the CPU an operation is complete when its call returns, and reading a value costs nothing. On a
GPU operations are queued on streams, and reading a value waits for all of them. Every device except
the CPU and `meta`, which has no memory, counts as a GPU: CUDA devices, and devices registered with
torch (`torch.utils.rename_privateuse1_backend`), for example the stand-in that counts launches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

CPU_STANDIN = "cpu_standin"
"""Name of the stand-in device (`lather.standin`) where it replaces a CPU."""
STANDINS = ("standin", CPU_STANDIN)
"""Names of the devices of `lather.standin`, which have no values."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that makes cuBLAS choose the same kernels in every run."""

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 flops per second that the makers state, by a part of the device's name; the first part
that fits (`has_word`) counts."""


class Read(Enum):
    """The values that the host reads from a device. For each of them it waits for the device, but
    on a CPU.

    A step of the trainer reads `STEP` once, `REFRESHES` if bases are due, and under expert
    parallelism `SIZES` for each block and micro-batch. A stand-in for a device, which has no
    values, answers by this meaning alone.
    """

    STEP = "losses, experts' loads and gradient norms of a step"
    REFRESHES = "flags: which refreshes were skipped, and which failed"
    GRADIENTS = "norms of gradients, and flags of the ranks that have one"
    ZERO = "a flag: whether a gradient is anything but zero"
    SAME = "a number and its negative, the maxima over ranks that must have the same number"
    COUNTS = "the numbers of labels and tokens of all ranks"
    COUNTERS = "the numbers of refreshes of all ranks"
    VOTE = "the greatest number that a rank gives"
    LOSS = "a validation loss"
    LOGITS = "the logits of the next token"
    SCORES = "log-probabilities and experts of given tokens"
    SIZES = "the numbers of rows and pairs that expert ranks send each other, (2, ranks, 2)"
    PAIRS = "the number of pairs of a token and a slot that have a row"
    ENDS = "the end of each expert's rows, where products are done expert by expert"
    EXPERT_ROWS = "the number of pairs of a token and a slot whose expert is one given expert"
    CHOSEN = "the different tokens or experts of a batch, where only their weights are read"
    RANGE = "the least and the greatest index, which have to be in range (on a CPU alone)"
    BOUNDS = "the boundaries of packed documents"
    FINITE = "a flag: whether a decomposition, or a saved state, is finite"
    CHOICE = "a flag that chooses between algorithms for a batch of matrices"
    WRONG = "a flag: whether any index or label is out of range or missing"


def read(x: Tensor, what: Read, *, wait: bool = True) -> Tensor:
    """Copy the values of `x` to the host. Every value by which the host decides travels from the
    device to the host through the functions of this module.

    Without `wait` they are there as soon as the current stream is done with its present work.
    """
    if x.device.type in STANDINS:
        values: Tensor = gpu_module(x).read(x.detach(), what, wait)
        return values
    return x.detach().to("cpu", non_blocking=not wait)


def is_true(flag: Tensor, what: Read) -> bool:
    """Read a flag without dims."""
    return bool(read(flag, what) if flag.device.type in STANDINS else flag)


def positions(flags: Tensor, what: Read) -> tuple[Tensor, ...]:
    """Return the indices of the true elements, for each dim (N,); the host waits for N."""
    if flags.device.type in STANDINS:
        indices: tuple[Tensor, ...] = gpu_module(flags).positions(flags, what)
        return indices
    return flags.nonzero(as_tuple=True)


def masked(x: Tensor, flags: Tensor, what: Read) -> Tensor:
    """Return the elements (N,) of `x` whose flag is true; the host waits for N."""
    if x.device.type in STANDINS:
        elements: Tensor = gpu_module(x).masked(x, flags, what)
        return elements
    return x[flags]


def is_gpu(on: Tensor | torch.device) -> bool:
    """Return whether a tensor's device, or a device, is a GPU."""
    device = on.device if isinstance(on, Tensor) else on
    return device.type not in ("cpu", "meta", CPU_STANDIN)


def is_nvidia(on: Tensor | torch.device) -> bool:
    """Return whether a device is a GPU of NVIDIA's. In a build of torch for AMD's GPUs these are
    called "cuda", too."""
    device = on.device if isinstance(on, Tensor) else on
    return device.type in ("cuda",) and torch.version.hip is None


def is_cpu(on: Tensor | torch.device) -> bool:
    """Return whether a tensor is on the CPU, or a device is the CPU."""
    device = on.device if isinstance(on, Tensor) else on
    return device.type in ("cpu", CPU_STANDIN)


def gpu_module(on: Tensor | torch.device) -> Any:
    """Return `torch.cuda`, or its counterpart for another kind of GPU: streams, events, memory
    counts, `synchronize`."""
    return torch.get_device_module(on.device if isinstance(on, Tensor) else on)


def stated_peak_flops(device: torch.device) -> tuple[float, str] | None:
    """Return a GPU's dense bf16 flops per second that its maker states, and the part of its name by
    which they are known; None: not known."""
    name = gpu_module(device).get_device_name(device) if is_gpu(device) else ""
    return next(((peak, part) for part, peak in PEAK_FLOPS.items() if has_word(name, part)), None)


def has_word(name: str, part: str) -> bool:
    """Return whether `part` is whole words of a device's name: an RTX A1000 is no A100."""
    return re.search(rf"\b{re.escape(part)}\b", name) is not None


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy `x` to the device unless it is there. A copy to a GPU starts from pinned memory, and the
    host does not wait for it."""
    return (
        x.pin_memory().to(device, non_blocking=True)
        if is_gpu(device) and x.device.type == "cpu"
        else x.to(device)
    )


def index_on(rows: Sequence[int], device: torch.device) -> Tensor:
    """Copy the rows as an index to a device, without waiting for it."""
    return to_device(torch.tensor(rows, dtype=torch.long, device="cpu"), device)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products in the dtypes that they are given, also inside a caller's autocast block. There is
    no autocast on the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def launching_on(x: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of `x` the current device inside the block, if `x` is on one: Triton launches on
    the current device, not on that of its arguments."""
    return gpu_module(x).device_of(x) if is_gpu(x) else nullcontext()


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Make operations give the same bits in every run inside the block; torch raises RuntimeError
    for an operation without such a kernel.

    (If torch only warned, the backward passes of attention would keep their fast kernels, whose
    sums depend on the order of threads.) Enter the block before the process's first matrix product
    on a GPU: cuBLAS reads the size of its workspaces once. torch remembers whether it was set then,
    and if not, raises RuntimeError for every product inside. Without `enabled` nothing changes.
    """
    if not enabled:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    options: Any = torch.utils.deterministic
    fill, workspace = options.fill_uninitialized_memory, os.environ.get(CUBLAS_WORKSPACE)
    try:
        torch.use_deterministic_algorithms(True)
        options.fill_uninitialized_memory = False  # Lather never reads uninitialized memory
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        options.fill_uninitialized_memory = fill
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE]
