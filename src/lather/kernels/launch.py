"""Launches, sizes of tiles and dtypes of the Triton implementations. Only `triton.py` files import
this module, because Triton may not be installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from lather.device import launching_on

BLOCK_COPIES = 90
"""Ten times the compute capability from which on GPUs copy blocks."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the GPU of its first argument, unless the grid is empty."""
    if all(grid):
        with launching_on(arguments[0]):
            kernel[grid](*arguments, **options)


def copies_blocks(x: Tensor) -> bool:
    """Tell whether the GPU of `x` copies blocks of tensors that a descriptor describes (TMA), as
    those of compute capability 9.0 or newer do. For older ones Triton makes slow loads of them."""
    try:
        with launching_on(x):
            target = driver.active.get_current_target()
    except RuntimeError:  # there is no GPU, but Triton's interpreter
        return True
    return bool(target.backend == "cuda" and target.arch >= BLOCK_COPIES)


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
