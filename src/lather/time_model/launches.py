"""Says which kernel an operation launches, and what it asks of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lather.standin.operations import VIEWS, flops
from lather.time_model import kinds, operations
from lather.time_model.rates import RateTable
from lather.time_model.triton_traffic import kernel_traffic

TRITON = "triton "
"""The names of Triton kernels begin so here."""


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of a kernel, or of several equal ones together."""

    name: str
    kind: str
    """The kind of kernel, in the tables of rates."""
    read: int
    """Bytes that it reads, each tensor once."""
    written: int
    flops: int = 0
    """Flops of products, attention and factorizations; causal masks save nothing."""
    times: int = 1
    """Number of kernels."""
    is_causal: bool = False
    """Whether a device computes half of the flops."""

    def seconds(self, rates: RateTable) -> float:
        """Compute the time on a device."""
        computed = self.flops / 2 if self.is_causal else self.flops
        return rates.seconds(self.kind, self.read + self.written, computed, self.times)


def launch_of(
    func: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    inputs: list[Tensor],
    made: list[Tensor],
    out: Any,
) -> KernelLaunch | None:
    """Return the launch of one of torch's operations, as `StandInMode.ran` gets it; None for one
    that only allocates, queries or makes views."""
    if func.is_view or name in VIEWS or name in operations.WITHOUT_KERNEL:
        return None
    is_causal = kinds.is_causal(func, name, args, kwargs)
    return KernelLaunch(
        name,
        kinds.kind_of(name, inputs, made, causal=is_causal),
        *operations.traffic(func, name, args, kwargs, inputs, made),
        flops=flops(func, name, args, kwargs, out),
        times=operations.launches(name, args),
        is_causal=is_causal,
    )


def launch_of_triton(function: Callable[..., Any], arguments: Mapping[str, Any]) -> KernelLaunch:
    """Return the launch of a Triton kernel with these arguments."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    return KernelLaunch(
        f"{TRITON}{function.__name__}",
        kinds.kind_of_triton(function, arguments),
        *kernel_traffic(function, arguments),
        flops=kinds.flops_of_triton(function, tensors),
    )


def launch_named(name: str, read: int, written: int, *, flops: int = 0) -> KernelLaunch:
    """Return the launch of a kernel that the stand-in names (`StandInMode.launch`)."""
    is_causal = name in kinds.FLEX
    return KernelLaunch(
        name, kinds.kind_of(name, (), ()), read, written, flops, is_causal=is_causal
    )
