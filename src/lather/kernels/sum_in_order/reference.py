"""The sum in torch's own operations: the specification of the kernel."""

from __future__ import annotations

from torch import Tensor

from lather.kernels.backend import wide_dtype


def sum_in_order(parts_CN: Tensor) -> Tensor:
    """Return the sum of the parts, from the first to the last."""
    first_N, *others = parts_CN.unbind()
    total_N = first_N.to(wide_dtype(first_N))
    for part_N in others:
        total_N = total_N + part_N
    return total_N.to(parts_CN.dtype)
