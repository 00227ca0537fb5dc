"""Measurements between ranks: how long an all-reduce, an all-to-all and a transfer to the next rank
take.

Bandwidth is what a rank sends, which of B bytes is 2 (n - 1) / n B in an all-reduce, (n - 1) / n B
in an all-to-all, and B to the next rank (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). Latency
is the time of the smallest message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lather.device import gpu_module, is_gpu

SMALLEST = 8
"""Bytes of the message whose time is the latency; all-to-all has 8 for each rank."""
REPEATS = 5
"""Measurements whose median counts."""


@dataclass(frozen=True)
class LinkFacts:
    """A measurement of the slowest rank."""

    operation: str
    backend: str
    num_bytes: int
    seconds: float
    sent: float
    """Bytes that each rank sends."""
    is_right: bool
    """Whether every rank received the right numbers."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.sent / self.seconds


def _all_reduce(x: Tensor, y: Tensor) -> None:
    y.copy_(x)
    dist.all_reduce(y)


def _to_next(x: Tensor, y: Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    transfers = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


Operation = Callable[[Tensor, Tensor], None]
OPERATIONS: dict[str, tuple[Operation, Callable[[int], float], Callable[[int, int], Tensor]]] = {
    "all-reduce": (
        _all_reduce,
        lambda size: 2 * (size - 1) / size,
        lambda rank, size: torch.tensor([size * (size - 1) / 2]),
    ),
    "all-to-all": (
        lambda x, y: dist.all_to_all_single(y, x),
        lambda size: (size - 1) / size,
        lambda rank, size: torch.arange(size),
    ),
    "to the next rank": (
        _to_next,
        lambda size: 1.0,
        lambda rank, size: torch.tensor([(rank - 1) % size]),
    ),
}
"""Operations by name: the function; the share of a message that each of `size` ranks sends; and the
numbers that rank `rank` must receive, in equal parts, if every rank sends its own number."""


def measure_links(device: torch.device) -> list[LinkFacts]:
    """Measure each operation with messages of several sizes. Collective: every rank gets the same
    result."""
    sizes = (SMALLEST, 2**20, (256 if is_gpu(device) else 16) * 2**20)
    return [_measure(name, num_bytes, device) for name in OPERATIONS for num_bytes in sizes]


def _measure(name: str, num_bytes: int, device: torch.device) -> LinkFacts:
    operation, share, expected = OPERATIONS[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    count = max(num_bytes // 4 // size, 2) * size if name == "all-to-all" else num_bytes // 4
    x = torch.full((count,), float(rank), device=device)
    y = torch.empty_like(x)

    def seconds() -> float:
        dist.all_reduce(torch.zeros(()))
        start = time.perf_counter()
        operation(x, y)
        if is_gpu(device):
            gpu_module(device).synchronize(device)
        return time.perf_counter() - start

    seconds()  # connections are made
    right = expected(rank, size).float()
    wrong = float(not torch.equal(y.cpu(), right.repeat_interleave(count // len(right))))
    worst = torch.tensor([median(seconds() for _ in range(REPEATS)), wrong])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return LinkFacts(
        name,
        "nccl" if is_gpu(device) else "gloo",
        4 * count,
        worst[0].item(),
        share(size) * 4 * count,
        not worst[1].item(),
    )
