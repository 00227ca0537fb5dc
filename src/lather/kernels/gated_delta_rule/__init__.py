"""The gated delta rule, the recurrence of Gated DeltaNet, in chunks of tokens.

Sources: Gated DeltaNet (Yang et al., arXiv:2412.06464, section 3.3) and the WY form of products of
Householder-like matrices (Yang et al., arXiv:2406.06484). `reference.py` is the recurrence itself.

Within a chunk let G_i be the sum of the decays up to token i, and let row i of D be the change
b_i (v_i - S^T k_i) that token i makes along its key. D depends on the earlier tokens of the chunk,
and on S_0, the state before it:

    (I + A) D = b (V - e^G K S_0)     A_ij = b_i e^(G_i - G_j) k_i . k_j for j < i, otherwise 0
    output    = e^G Q S_0 + M D       M_ij = e^(G_i - G_j) q_i . k_j     for j <= i, otherwise 0
    S_C       = e^G_C S_0 + (e^(G_C - G) K)^T D

(I + A)^-1 b V and (I + A)^-1 b e^G K are computed for all chunks at once; what remains is a loop
over chunks with four products in each. Tokens of different documents have A = M = 0, and S_0
reaches only the document of the token before the chunk.

Letters: B sequences, S positions, H heads, K width of queries and keys, V width of values, N
chunks, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.backend import wide_dtype
from lather.kernels.gated_delta_rule import reference
from lather.shapes import Float, Int

CHUNK = 64
"""Tokens of a chunk. The work within chunks grows with it, and the loop over chunks shrinks."""


def gated_delta_rule(
    q_BSHK: Float[Tensor, "b s h k"],
    k_BSHK: Float[Tensor, "b s h k"],
    v_BSHV: Float[Tensor, "b s h v"],
    decay_BSH: Float[Tensor, "b s h"],
    rate_BSH: Float[Tensor, "b s h"],
    document_BS: Int[Tensor, "b s"] | None = None,
    state_BHKV: Float[Tensor, "b h k v"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "b s h v"], Float[Tensor, "b h k v"]]:
    """Return the output of every token in the dtype of v, and the state after the last token in
    fp32 (fp64 for fp64), the dtype of all computation.

    `decay_BSH` is the logarithm of the factor by which a token shrinks the state; `rate_BSH` is
    between 0 and 1. `document_BS` numbers the documents of packed sequences (None: every sequence
    is one document); `state_BHKV` is the state before the first token (None: zero).

    A single token takes the recurrence itself. Raises ValueError for shapes that do not match.
    """
    validate(q_BSHK, k_BSHK, v_BSHV, decay_BSH, rate_BSH, document_BS, state_BHKV)
    dtype = wide_dtype(v_BSHV)
    inputs = [x.to(dtype) for x in (q_BSHK, k_BSHK, v_BSHV, decay_BSH, rate_BSH)]
    state = None if state_BHKV is None else state_BHKV.to(dtype)
    length = k_BSHK.shape[1]
    if length == 1:
        out_BSHV, state = reference.gated_delta_rule(*inputs, document_BS, state)
        return out_BSHV.to(v_BSHV.dtype), state
    q, k, v, decay, rate = (_in_chunks(x, chunk) for x in inputs)
    document_BNC = None
    if document_BS is not None:  # the padding of the last chunk belongs to the last document
        document_BNC = (
            _in_chunks(document_BS - document_BS[:, -1:], chunk) + document_BS[:, -1:, None]
        )
    out_BHNCV, state = _chunked(q, k, v, decay, rate, document_BNC, state)
    out_BSHV = out_BHNCV.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return out_BSHV.to(v_BSHV.dtype), state


def _chunked(
    q_BHNCK: Tensor,
    k_BHNCK: Tensor,
    v_BHNCV: Tensor,
    decay_BHNC: Tensor,
    rate_BHNC: Tensor,
    document_BNC: Tensor | None,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, chunk by chunk, and the last state. Letters as in the module's
    docstring."""
    size = k_BHNCK.shape[3]
    sums_BHNC = decay_BHNC.cumsum(-1)
    earlier_CC = torch.ones(size, size, dtype=torch.bool, device=k_BHNCK.device).tril()
    decays_BHNCC = sums_BHNC[..., :, None] - sums_BHNC[..., None, :]
    from_start_BHNC = sums_BHNC.exp()
    to_end_BHNC = (sums_BHNC[..., -1:] - sums_BHNC).exp()
    pairs = earlier_CC
    if document_BNC is not None:
        document_B1NC = document_BNC.unsqueeze(1)
        before_B1N = document_B1NC[..., -1].roll(1, -1)
        before_B1N[..., 0] = document_B1NC[..., 0, 0]
        pairs = earlier_CC & (document_B1NC.unsqueeze(-1) == document_B1NC.unsqueeze(-2))
        from_start_BHNC = from_start_BHNC * (document_B1NC == before_B1N.unsqueeze(-1))
        to_end_BHNC = to_end_BHNC * (document_B1NC == document_B1NC[..., -1:])
    decays_BHNCC = decays_BHNCC.masked_fill(~pairs, -torch.inf).exp()
    across_BHN = from_start_BHNC[..., -1]
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
    length = x_BSx.shape[1]
    missing = -length % chunk
    padded = F.pad(x_BSx, (0, 0) * (x_BSx.dim() - 2) + (0, missing))
    chunks = padded.unflatten(1, (-1, chunk))
    return chunks if x_BSx.dim() == 2 else chunks.movedim(3, 1)


def validate(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    rate_BSH: Tensor,
    document_BS: Tensor | None,
    state_BHKV: Tensor | None,
) -> None:
    """Raise ValueError for shapes that do not match."""
    shapes = {
        "q": (q_BSHK, k_BSHK.shape),
        "v": (v_BSHV, (*k_BSHK.shape[:3], v_BSHV.shape[-1])),
        "decay": (decay_BSH, k_BSHK.shape[:3]),
        "rate": (rate_BSH, k_BSHK.shape[:3]),
    }
    if document_BS is not None:
        shapes["document"] = (document_BS, k_BSHK.shape[:2])
    if state_BHKV is not None:
        batch, _, heads, width = k_BSHK.shape
        shapes["state"] = (state_BHKV, (batch, heads, width, v_BSHV.shape[-1]))
    for name, (x, shape) in shapes.items():
        if x.shape != torch.Size(shape):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: with keys of shape {tuple(k_BSHK.shape)} it "
                f"has to be {tuple(shape)}"
            )
