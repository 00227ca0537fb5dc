"""Memory of the host for state that visits a GPU (`offload`).

It is pinned, so that copies run at the speed of the bus while host and device go on. torch rounds
each pinned allocation up to a power of two, which would waste a third of it, so blocks of such a
size are allocated and divided among many stacks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lather.device import is_gpu
from lather.optim.rule import Rule

LARGEST_BLOCK = 2**32
"""Bytes of the largest block, unless a stack is larger. A block is free when the state in all of
its stacks has been moved away."""

ALIGNMENT = 512
"""Each stack begins at a multiple of so many bytes."""


def is_offloaded(rule: Rule, device: torch.device) -> bool:
    """Whether the state of a rule's matrices on this device is kept in the host's memory, apart
    from the device's."""
    return rule.offload and is_gpu(device)


class PinnedMemory:
    """Pinned memory for stacks that together take a number of bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._coming = num_bytes
        self._free = list[Tensor]()
        """Free memory at the end of each block."""

    def stack(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a contiguous tensor, with any values, out of the first block that has
        room."""
        num_bytes = math.prod(size) * dtype.itemsize
        taken = padded(num_bytes)
        number = next((i for i, x in enumerate(self._free) if len(x) >= taken), len(self._free))
        if number == len(self._free):
            least, most = 1 << (taken - 1).bit_length(), 1 << max(self._coming, 1).bit_length() - 1
            self._free.append(pinned(max(least, min(most, LARGEST_BLOCK))))
        memory, self._free[number] = self._free[number].split_with_sizes(
            (taken, len(self._free[number]) - taken)
        )
        self._coming -= taken
        return memory[:num_bytes].view(dtype).view(size)


def padded(num_bytes: int) -> int:
    """Return the bytes that a stack takes in a block."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT


def is_pinned(x: Tensor) -> bool:
    return x.is_pinned()


def pinned(num_bytes: int) -> Tensor:
    """Allocate pinned bytes."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
