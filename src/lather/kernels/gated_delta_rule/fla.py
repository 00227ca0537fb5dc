"""The gated delta rule by the kernels of `fla-core` (flash-linear-attention), if it is installed.

Source: https://github.com/fla-org/flash-linear-attention, `chunk_gated_delta_rule`. It multiplies
in bf16 or fp16, keeps states and sums in fp32, and has one sequence (1, T) for packed documents.

Letters: those of `reference`; L boundaries of documents.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from lather.device import STANDINS, is_gpu

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""Largest width of queries and keys."""


def takes(k_BSGK: Tensor, cu_seqlens: Tensor | None, *, is_packed: bool, with_state: bool) -> bool:
    """Tell whether fla is installed and has kernels for keys like these. For packed documents it
    needs their boundaries, and has no last state of each row."""
    return (
        is_gpu(k_BSGK)
        and k_BSGK.device.type not in STANDINS
        and k_BSGK.dtype in DTYPES
        and k_BSGK.shape[-1] <= WIDEST
        and (not is_packed or (cu_seqlens is not None and not with_state))
        and importlib.util.find_spec("fla") is not None
    )


def gated_delta_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    rate_BSH: Tensor,
    cu_seqlens: Tensor | None,
    state_BHKV: Tensor | None,
    *,
    with_state: bool,
) -> tuple[Tensor, ...]:
    """Return the outputs, and with `with_state` the last state in fp32."""
    kernels = importlib.import_module("fla.ops.gated_delta_rule")
    repeats = v_BSHV.shape[2] // k_BSGK.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q_BSGK, k_BSGK))
    inputs = [x.contiguous() for x in (q, k, v_BSHV, decay_BSH, rate_BSH)]
    if cu_seqlens is not None:
        inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
    out, state_BHKV = kernels.chunk_gated_delta_rule(
        *inputs,
        initial_state=state_BHKV,
        output_final_state=with_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    out_BSHV = out.view(v_BSHV.shape)
    return (out_BSHV, state_BHKV) if with_state else (out_BSHV,)
