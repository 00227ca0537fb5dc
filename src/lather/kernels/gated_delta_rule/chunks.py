"""The gated delta rule in chunks of tokens, in plain torch: matrix products instead of a loop over
tokens.

Source: the WY form of products of Householder-like matrices (Yang et al., arXiv:2406.06484), with
decays (arXiv:2412.06464, section 3.3).

Within a chunk let G_i be the sum of the decays up to token i, and let row i of D be the change
b_i (v_i - S^T k_i) that token i makes along its key. D depends on the earlier tokens of the chunk,
and on S_0, the state before it:

    (I + A) D = b (V - e^G K S_0)     A_ij = b_i e^(G_i - G_j) k_i . k_j for j < i, otherwise 0
    output    = e^G Q S_0 + M D       M_ij = e^(G_i - G_j) q_i . k_j     for j <= i, otherwise 0
    S_C       = e^G_C S_0 + (e^(G_C - G) K)^T D

(I + A)^-1 b V and (I + A)^-1 b e^G K are computed for all chunks at once; what remains is a loop
over chunks with two products in each. Tokens of different documents have A = M = 0, and S_0
reaches only the document of the token before the chunk.

All of this is affine in the state before the first token: the last state is that of a start from
zero plus a matrix times the first state, and the same loop over [0 | I] in place of a state gives
both (`Chunks.transition`).

Letters: those of `reference`; N chunks, C tokens of a chunk, R = B H, X = V + K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.gated_delta_rule.reference import prepared, start_of_transition

CHUNK = 64
"""Tokens of a chunk. The work within chunks grows with it, and the loop over chunks shrinks."""


def gated_delta_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    rate_BSH: Tensor,
    document_BS: Tensor | None = None,
    state_BHKV: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return what the reference returns; all tensors have the same dtype."""
    tokens = (q_BSGK, k_BSGK, v_BSHV, decay_BSH, rate_BSH)
    return Chunks.of(*tokens, document_BS, chunk=chunk).run(state_BHKV)


class Chunks(NamedTuple):
    """The operands of all chunks, which with a state give their outputs."""

    across_BHN11: Tensor
    """The factor of a chunk on the state before it, e^G_C."""
    value_BHNCV: Tensor
    """(I + A)^-1 b V."""
    key_BHNCK: Tensor
    """(I + A)^-1 b e^G K."""
    k_BHNCK: Tensor
    """e^(G_C - G) K."""
    q_BHNCK: Tensor
    """e^G Q."""
    m_BHNCC: Tensor
    """M."""
    length: int
    """Number of tokens, S, without the padding of the last chunk."""

    @classmethod
    def of(
        cls,
        q_BSGK: Tensor,
        k_BSGK: Tensor,
        v_BSHV: Tensor,
        decay_BSH: Tensor,
        rate_BSH: Tensor,
        document_BS: Tensor | None = None,
        *,
        chunk: int = CHUNK,
    ) -> Chunks:
        """Return the chunks of these tokens, of which all but the documents have the same dtype."""
        inputs = (*prepared(q_BSGK, k_BSGK, v_BSHV.shape[2]), v_BSHV, decay_BSH, rate_BSH)
        document_BNC = None
        if document_BS is not None:  # the padding of the last chunk belongs to the last document
            last_B1 = document_BS[:, -1:]
            document_BNC = _in_chunks(document_BS - last_B1, chunk) + last_B1.unsqueeze(-1)
        q, k, v, decay, rate = (_in_chunks(x, chunk) for x in inputs)
        return _operands(q, k, v, decay, rate, document_BNC)._replace(length=v_BSHV.shape[1])

    def run(self, state_BHKV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, S, H, V) and the last state, from the state before the first
        token; None: zero."""
        batch, heads, _, _, width = self.k_BHNCK.shape
        if state_BHKV is None:
            values = self.value_BHNCV.shape[-1]
            state_BHKV = self.value_BHNCV.new_zeros(batch, heads, width, values)
        operands = (*self[:4], state_BHKV)
        scanned = _Scan.apply(*(x.flatten(0, 1) for x in operands))  # type: ignore[no-untyped-call]
        state_BHNKV, d_BHNCV, last_BHKV = (x.unflatten(0, (batch, heads)) for x in scanned)
        out_BHNCV = self.q_BHNCK @ state_BHNKV + self.m_BHNCC @ d_BHNCV
        return out_BHNCV.flatten(2, 3)[:, :, : self.length].transpose(1, 2), last_BHKV

    def transition(self) -> Tensor:
        """Return what `reference.transition` does, (B, H, K, V + K)."""
        width = self.k_BHNCK.shape[-1]
        operands = (self.across_BHN11, self.value_BHNCV, self.key_BHNCK, self.k_BHNCK.mT)
        state_BHKX = start_of_transition(self.value_BHNCV[:, :, 0, 0], width)
        state_RKX = state_BHKX.flatten(0, 1)
        for across_R11, value_RCV, key_RCK, k_RKC in zip(
            *(x.flatten(0, 1).unbind(1) for x in operands), strict=True
        ):
            d_RCX = torch.baddbmm(F.pad(value_RCV, (0, width)), key_RCK, state_RKX, alpha=-1)
            state_RKX = torch.baddbmm(across_R11 * state_RKX, k_RKC, d_RCX)
        return state_RKX.view_as(state_BHKX)


def _operands(
    q_BHNCK: Tensor,
    k_BHNCK: Tensor,
    v_BHNCV: Tensor,
    decay_BHNC: Tensor,
    rate_BHNC: Tensor,
    document_BNC: Tensor | None,
) -> Chunks:
    """Return the chunks, as long as the padding makes them."""
    num_chunks, size = k_BHNCK.shape[2:4]
    sums_BHNC = decay_BHNC.cumsum(-1)
    pairs = torch.ones(size, size, dtype=torch.bool, device=k_BHNCK.device).tril()
    from_start_BHNC = sums_BHNC.exp()
    to_end_BHNC = (sums_BHNC[..., -1:] - sums_BHNC).exp()
    if document_BNC is not None:
        document_B1NC = document_BNC.unsqueeze(1)
        before_B1N = torch.cat((document_B1NC[..., :1, 0], document_B1NC[..., :-1, -1]), dim=-1)
        pairs = pairs & (document_B1NC.unsqueeze(-1) == document_B1NC.unsqueeze(-2))
        from_start_BHNC = from_start_BHNC * (document_B1NC == before_B1N.unsqueeze(-1))
        to_end_BHNC = to_end_BHNC * (document_B1NC == document_B1NC[..., -1:])
    decays_BHNCC = sums_BHNC.unsqueeze(-1) - sums_BHNC.unsqueeze(-2)
    decays_BHNCC = decays_BHNCC.masked_fill(~pairs, -torch.inf).exp()
    rated_BHNCK = rate_BHNC.unsqueeze(-1) * k_BHNCK
    a_BHNCC = (rated_BHNCK @ k_BHNCK.mT * decays_BHNCC).tril(-1)
    right = torch.cat(
        (rate_BHNC.unsqueeze(-1) * v_BHNCV, from_start_BHNC.unsqueeze(-1) * rated_BHNCK), dim=-1
    )
    solved = torch.linalg.solve_triangular(a_BHNCC, right, upper=False, unitriangular=True)
    value_BHNCV, key_BHNCK = solved.split((v_BHNCV.shape[-1], k_BHNCK.shape[-1]), dim=-1)
    m_BHNCC = q_BHNCK @ k_BHNCK.mT * decays_BHNCC
    q_BHNCK = from_start_BHNC.unsqueeze(-1) * q_BHNCK
    k_BHNCK = to_end_BHNC.unsqueeze(-1) * k_BHNCK
    across_BHN11 = from_start_BHNC[..., -1, None, None]
    operands = (across_BHN11, value_BHNCV, key_BHNCK, k_BHNCK, q_BHNCK, m_BHNCC)
    return Chunks(*operands, num_chunks * size)


class _Scan(torch.autograd.Function):
    """The loop over chunks: D = value - key S and S' = across S + K^T D. Returns S before each
    chunk, D, and the last S; backward is a loop of as few operations."""

    @staticmethod
    def forward(
        ctx: Any,
        across_RN11: Tensor,
        value_RNCV: Tensor,
        key_RNCK: Tensor,
        k_RNCK: Tensor,
        state_RKV: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, changes = [], []
        operands = (across_RN11, value_RNCV, key_RNCK, k_RNCK.mT)
        for across_R11, value_RCV, key_RCK, k_RKC in zip(
            *(x.unbind(1) for x in operands), strict=True
        ):
            states.append(state_RKV)
            changes.append(torch.baddbmm(value_RCV, key_RCK, state_RKV, alpha=-1))
            state_RKV = torch.baddbmm(across_R11 * state_RKV, k_RKC, changes[-1])
        state_RNKV, d_RNCV = torch.stack(states, dim=1), torch.stack(changes, dim=1)
        ctx.save_for_backward(across_RN11, key_RNCK, k_RNCK, state_RNKV, d_RNCV)
        return state_RNKV, d_RNCV, state_RKV

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_state_RNKV: Tensor, grad_d_RNCV: Tensor, grad_RKV: Tensor
    ) -> tuple[Tensor, ...]:
        across_RN11, key_RNCK, k_RNCK, state_RNKV, d_RNCV = ctx.saved_tensors
        after, of_changes = [], []
        operands = (across_RN11, grad_state_RNKV, grad_d_RNCV, key_RNCK.mT, k_RNCK)
        chunks = zip(*(x.unbind(1) for x in operands), strict=True)
        for across_R11, grad_state_RKV, grad_d_RCV, key_RKC, k_RCK in reversed([*chunks]):
            after.append(grad_RKV)
            of_changes.append(torch.baddbmm(grad_d_RCV, k_RCK, grad_RKV))
            grad_RKV = torch.addcmul(grad_state_RKV, across_R11, grad_RKV)
            grad_RKV = torch.baddbmm(grad_RKV, key_RKC, of_changes[-1], alpha=-1)
        after_RNKV = torch.stack(after[::-1], dim=1)
        grad_d_RNCV = torch.stack(of_changes[::-1], dim=1)
        return (
            (state_RNKV * after_RNKV).sum((-2, -1), keepdim=True),
            grad_d_RNCV,
            -grad_d_RNCV @ state_RNKV.mT,
            d_RNCV @ after_RNKV.mT,
            grad_RKV,
        )


def _in_chunks(x_BSx: Tensor, chunk: int) -> Tensor:
    """Return (B, S, H, ...) as (B, H, N, C, ...), and (B, S) as (B, N, C); the last chunk is filled
    with zeros, which change no state."""
    missing = -x_BSx.shape[1] % chunk
    padded = F.pad(x_BSx, (0, 0) * (x_BSx.dim() - 2) + (0, missing))
    chunks = padded.unflatten(1, (-1, chunk))
    return chunks if x_BSx.dim() == 2 else chunks.movedim(3, 1)
