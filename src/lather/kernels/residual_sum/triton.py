"""The sum on CUDA: a program adds a run of elements, each read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, wide

BLOCK = 1024
"""Elements of a program."""


def add_terms(residual: Tensor, routed_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
    residual, routed_TD = residual.contiguous(), routed_TD.contiguous()
    out = torch.empty_like(residual)
    launch(
        _add_kernel,
        (triton.cdiv(out.numel(), BLOCK),),
        residual,
        routed_TD,
        residual if shared_TD is None else shared_TD.contiguous(),
        out,
        out.numel(),
        SHARED=shared_TD is not None,
        WIDE=wide(residual),
        BLOCK=BLOCK,
    )
    return out


@triton.jit
def _add_kernel(
    residual_ptr,
    routed_ptr,
    shared_ptr,
    sum_ptr,
    num_elements,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    total = tl.load(routed_ptr + place, mask=inside, other=0.0).to(WIDE)
    if SHARED:
        total += tl.load(shared_ptr + place, mask=inside, other=0.0).to(WIDE)
    total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(WIDE)
    tl.store(sum_ptr + place, total.to(sum_ptr.dtype.element_ty), mask=inside)
