"""The work that a rank's step asks for: flops of products, attention and factorisations, and bytes that it sends to other ranks.

Counted by a dry run (`lather.planning.dry_run`), operation by operation. What Triton kernels multiply is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lather.standin.operations import nbytes, tensors_in

MICRO_BATCHES, REFRESH, REST = "micro-batches", "refresh", "rest"


@dataclass(frozen=True)
class Work:
    """One rank's work."""

    flops: float = 0.0
    sent: float = 0.0
    """Bytes to other ranks, by rings where all ranks take part, but for `exchanged`."""
    exchanged: float = 0.0
    """Bytes of rows of tokens to and from the experts of other ranks."""

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.sent + other.sent, self.exchanged + other.exchanged)

    def __mul__(self, factor: float) -> Work:
        return Work(self.flops * factor, self.sent * factor, self.exchanged * factor)


@dataclass
class WorkTally:
    """Adds up a step's work by how often it comes: with every micro-batch, with every refresh of the bases, once."""

    repeats: float
    """Micro-batches of the run, for each that is walked."""
    in_micro_batch: bool = False
    refreshing: bool = False
    found: defaultdict[str, Work] = field(default_factory=lambda: defaultdict(Work))

    def restart(self) -> None:
        self.found.clear()

    def add(self, work: Work) -> None:
        when = MICRO_BATCHES if self.in_micro_batch else REFRESH if self.refreshing else REST
        self.found[when] += work * (self.repeats if self.in_micro_batch else 1.0)

    def travels(self, name: str, args: Sequence[Any]) -> None:
        """An operation of a process group, named as torch does."""
        size = sent_bytes(name, args)
        is_exchange = self.in_micro_batch and name.startswith("alltoall")
        self.add(Work(exchanged=size) if is_exchange else Work(sent=size))


def sent_bytes(name: str, args: Sequence[Any]) -> int:
    """Bytes that a rank sends in an operation of a process group, named as torch does; 0 for receiving and for waiting."""
    sizes = [sum(map(nbytes, tensors_in(x))) for x in (*args[:2], (), ())]
    if name in ("_allgather_base_", "allgather_"):
        return sizes[0] - sizes[1]  # what it gathers less what it had: a ring hands that on
    if name in ("_reduce_scatter_base_", "reduce_scatter_"):
        return sizes[1] - sizes[0]
    if name == "allreduce_":
        return 2 * sizes[0]
    if name in ("alltoall_base_", "alltoall_"):
        return sizes[1]
    return sizes[0] if name in ("send", "broadcast_") else 0
