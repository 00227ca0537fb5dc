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
over chunks with four products in each. Tokens of different documents have A = M = 0, and S_0
reaches only the document of the token before the chunk.

Letters: those of `reference`; N chunks, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.gated_delta_rule.reference import prepared

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
    length = v_BSHV.shape[1]
    inputs = (*prepared(q_BSGK, k_BSGK, v_BSHV.shape[2]), v_BSHV, decay_BSH, rate_BSH)
    q, k, v, decay, rate = (_in_chunks(x, chunk) for x in inputs)
    document_BNC = None
    if document_BS is not None:  # the padding of the last chunk belongs to the last document
        last_B1 = document_BS[:, -1:]
        document_BNC = _in_chunks(document_BS - last_B1, chunk) + last_B1.unsqueeze(-1)
    out_BHNCV, state = _all_chunks(q, k, v, decay, rate, document_BNC, state_BHKV)
    return out_BHNCV.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _all_chunks(
    q_BHNCK: Tensor,
    k_BHNCK: Tensor,
    v_BHNCV: Tensor,
    decay_BHNC: Tensor,
    rate_BHNC: Tensor,
    document_BNC: Tensor | None,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, chunk by chunk, and the last state."""
    size = k_BHNCK.shape[3]
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
    across_BHN = from_start_BHNC[..., -1]
    q_BHNCK = from_start_BHNC.unsqueeze(-1) * q_BHNCK
    k_BHNCK = to_end_BHNC.unsqueeze(-1) * k_BHNCK

    state = state_BHKV
    if state is None:
        state = v_BHNCV.new_zeros(*k_BHNCK.shape[:2], k_BHNCK.shape[-1], v_BHNCV.shape[-1])
    outputs = []
    for n in range(k_BHNCK.shape[2]):
        d_BHCV = value_BHNCV[:, :, n] - key_BHNCK[:, :, n] @ state
        outputs.append(q_BHNCK[:, :, n] @ state + m_BHNCC[:, :, n] @ d_BHCV)
        state = across_BHN[:, :, n, None, None] * state + k_BHNCK[:, :, n].mT @ d_BHCV
    return torch.stack(outputs, dim=2), state


def _in_chunks(x_BSx: Tensor, chunk: int) -> Tensor:
    """Return (B, S, H, ...) as (B, H, N, C, ...), and (B, S) as (B, N, C); the last chunk is filled
    with zeros, which change no state."""
    missing = -x_BSx.shape[1] % chunk
    padded = F.pad(x_BSx, (0, 0) * (x_BSx.dim() - 2) + (0, missing))
    chunks = padded.unflatten(1, (-1, chunk))
    return chunks if x_BSx.dim() == 2 else chunks.movedim(3, 1)
