"""The gated delta rule by the kernels of `fla-core` (flash-linear-attention), if it is installed.

Source: https://github.com/fla-org/flash-linear-attention, `chunk_gated_delta_rule`. It multiplies
in bf16 or fp16, keeps states and sums in fp32, and has one sequence (1, T) for packed documents.

Letters: those of `reference`; L boundaries of documents.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import STANDINS, is_gpu
from lather.kernels.gated_delta_rule.reference import start_of_transition

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""Largest width of queries and keys."""


def takes(k_BSGK: Tensor, cu_seqlens: Tensor | None, *, is_packed: bool) -> bool:
    """Tell whether fla is installed and has kernels for keys like these. For packed documents it
    needs their boundaries."""
    return (
        is_gpu(k_BSGK)
        and k_BSGK.device.type not in STANDINS
        and k_BSGK.dtype in DTYPES
        and k_BSGK.shape[-1] <= WIDEST
        and (not is_packed or cu_seqlens is not None)
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
    """Return the outputs, and with `with_state` the last state of each row in fp32. fla has a state
    per document: that of a row is its first document's before, and its last document's after."""
    kernels = importlib.import_module("fla.ops.gated_delta_rule")
    (batch, length, heads), of_documents = v_BSHV.shape[:3], state_BHKV
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q_BSGK, k_BSGK))
    inputs = [x.contiguous() for x in (q, k, v_BSHV, decay_BSH, rate_BSH)]
    if cu_seqlens is not None:
        inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
        edges = torch.arange(0, (batch + 1) * length, length, device=cu_seqlens.device)
        number = torch.searchsorted(cu_seqlens, edges.to(cu_seqlens.dtype))
        if state_BHKV is not None:
            zeros = state_BHKV.new_zeros(len(cu_seqlens) - 1, *state_BHKV.shape[1:])
            of_documents = zeros.index_copy(0, number[:-1], state_BHKV)
    out, last = kernels.chunk_gated_delta_rule(
        *inputs,
        initial_state=of_documents,
        output_final_state=with_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    out_BSHV = out.view(v_BSHV.shape)
    if not with_state:
        return (out_BSHV,)
    return out_BSHV, last if cu_seqlens is None else last.index_select(0, number[1:] - 1)


class FlaSlices(NamedTuple):
    """The rule on the slices of a rank, R = B rows of P = S tokens."""

    q_RPGK: Tensor
    k_RPGK: Tensor
    v_RPHV: Tensor
    decay_RPH: Tensor
    rate_RPH: Tensor
    cu_seqlens: Tensor | None

    def transition(self) -> Tensor:
        """Return what `reference.transition` does, in fp32."""
        width = self.k_RPGK.shape[-1]
        start_RHKX = start_of_transition(self.v_RPHV[:, 0].float(), width)
        values_RPHX = F.pad(self.v_RPHV, (0, width))
        return self._run(self.k_RPGK, values_RPHX, start_RHKX.contiguous())[1]

    def run(self, state_RHKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the last states in fp32."""
        return self._run(self.q_RPGK, self.v_RPHV, state_RHKV)

    def _run(self, q_RPGK: Tensor, v_RPHV: Tensor, state_RHKV: Tensor) -> tuple[Tensor, Tensor]:
        tokens = (q_RPGK, self.k_RPGK, v_RPHV, self.decay_RPH, self.rate_RPH)
        out_RPHV, last_RHKV = gated_delta_rule(
            *tokens, self.cu_seqlens, state_RHKV, with_state=True
        )
        return out_RPHV, last_RHKV
