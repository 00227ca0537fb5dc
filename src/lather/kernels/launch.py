"""Launches, sizes of tiles and dtypes of the Triton implementations. Only `triton.py` files import
this module, because Triton may not be installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.device import launching_on


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the GPU of its first argument, unless the grid is empty."""
    if all(grid):
        with launching_on(arguments[0]):
            kernel[grid](*arguments, **options)


def tile(num_columns: int, elements: int, *, whole_rows: bool = False) -> dict[str, int]:
    """Return ROWS and BLOCK, the sizes of a tile with this number of elements, both powers of 2;
    with `whole_rows` a row always fits into a tile."""
    block = triton.next_power_of_2(max(num_columns, 1))
    if not whole_rows:
        block = min(block, elements)
    return {"ROWS": max(elements // block, 1), "BLOCK": block}


def wide(*tensors: Tensor) -> tl.dtype:
    """Return the dtype in which kernels compute: fp64 if a tensor has it, fp32 otherwise."""
    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32
