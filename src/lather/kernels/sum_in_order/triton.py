"""The sum on CUDA: a program adds a run of elements of all parts in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, wide

BLOCK = 1024
"""Elements of a program."""


def sum_in_order(parts_CN: Tensor) -> Tensor:
    parts_CN = parts_CN.contiguous()
    num_parts, num_elements = parts_CN.shape
    out = parts_CN.new_empty(num_elements)
    launch(
        _sum_kernel,
        (triton.cdiv(num_elements, BLOCK),),
        parts_CN,
        out,
        num_elements,
        PARTS=num_parts,
        WIDE=wide(parts_CN),
        BLOCK=BLOCK,
    )
    return out


@triton.jit
def _sum_kernel(
    parts_ptr,
    sum_ptr,
    num_elements,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    total = tl.load(parts_ptr + place, mask=inside, other=0.0).to(WIDE)
    for _ in tl.static_range(1, PARTS):
        parts_ptr += num_elements
        total += tl.load(parts_ptr + place, mask=inside, other=0.0).to(WIDE)
    tl.store(sum_ptr + place, total.to(sum_ptr.dtype.element_ty), mask=inside)
