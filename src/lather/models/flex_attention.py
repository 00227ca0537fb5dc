"""Attention by flex attention, for windows, documents and sinks on a GPU, and its compilation.

Letters: B sequences, S positions, H heads, G key-value heads, N width of a head's query and key, U
width of a head's value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from lather.device import is_gpu
from lather.errors import UserError
from lather.shapes import Float
from lather.torch_private import recompile_limit, recompile_limit_hit

FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_MIN_WIDTH = 16
"""Smallest width of a head that flex attention takes."""
SMALL_TILES: FlexKernelOptions = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}  # type: ignore[typeddict-unknown-key]
MOST_VARIANTS = 64
"""Variants of flex attention that a process may compile: for each kind of mask (rows or documents,
with a window or without), with gradients and without, and for at most five shapes: the first, other
batch sizes, batch size 1, other lengths, and batch size 1 with other lengths. That makes 40;
torch's limit is 8. (Block masks are made without a compiler.)"""


def flexible_attention(
    q_BHSN: Float[Tensor, "b h s n"],
    k_BGSN: Float[Tensor, "b g s n"],
    v_BGSU: Float[Tensor, "b g s u"],
    block_mask: BlockMask,
    scale: float,
    sinks_H: Float[Tensor, " h"] | None,
) -> Float[Tensor, "b h s u"]:
    """Attend with flex attention, compiled on CUDA. A sink only scales the output by exp(lse) /
    (exp(lse) + exp(sink))."""
    attention = for_device(flex_attention, q_BHSN.device)
    y_BHSU, aux = attention(
        q_BHSN,
        k_BGSN,
        v_BGSU,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_BHSN.shape[1] != k_BGSN.shape[1],
        kernel_options=flex_options(q_BHSN),
        return_aux=AuxRequest(lse=sinks_H is not None),
    )
    if sinks_H is None:
        return y_BHSU
    share_BHS: Tensor = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[:, None])
    return y_BHSU * share_BHS.unsqueeze(-1).to(y_BHSU.dtype)


def flex_options(q_BHSN: Tensor) -> FlexKernelOptions | None:
    """Return tile sizes for flex attention's forward kernel if torch's default, 64 x 64 in three
    stages, exceeds a block's shared memory; else None. This happens for fp32 heads wider than 128,
    which are padded to 256. The smaller tiles take 32 + 32 + 32 KiB if values are as wide; the
    smallest GPUs have 99 KiB. (The backward kernel has tiles of 16 x 16 in fp32.)"""
    is_wide = q_BHSN.dtype == torch.float32 and q_BHSN.shape[-1] > 128
    return SMALL_TILES if is_wide else None


@functools.cache
def for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function of flex attention on CUDA, where it would otherwise allocate (S, S)
    tensors. On other devices its compiled form has no backward."""
    return compiled_often(function) if is_gpu(device) else function


def compiled_often(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for up to `MOST_VARIANTS` kinds of arguments; calls with more raise
    UserError, where torch would run the function uncompiled."""
    compiled = torch.compile(function, fullgraph=True)

    def call(*args: Any, **options: Any) -> Any:
        try:
            with recompile_limit(MOST_VARIANTS):
                return compiled(*args, **options)
        except recompile_limit_hit() as error:
            raise UserError(
                f"{function.__name__} was compiled for {MOST_VARIANTS} kinds of masks and shapes, "
                "the most that a process may have, and uncompiled it would take memory quadratic "
                "in the length: use another process for another model"
            ) from error

    return call
