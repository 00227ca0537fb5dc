"""The gated delta rule as a recurrence over tokens, in plain torch: the specification.

Source: Gated DeltaNet (Yang et al., arXiv:2412.06464, equation 10). A head keeps a matrix S that
maps keys to values. A token with query q, key k, value v, decay g <= 0 and rate b changes it to

    S <- e^g S;    S <- S + k (b (v - S^T k))^T;    output S^T q

so that S maps k to a value nearer to v. Queries and keys are normalized first, and queries are
divided by sqrt(K). At the first token of a document S is zero.

Letters: B sequences, S positions, G key heads, H value heads, K width of queries and keys, V width
of values, X = V + K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

EPS = 1e-6
"""Number that is added to the squared length of a query or key."""


def gated_delta_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    rate_BSH: Tensor,
    document_BS: Tensor | None = None,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, S, H, V) and the last state (B, H, K, V), token after token."""
    q_BSHK, k_BSHK = prepared(q_BSGK, k_BSGK, v_BSHV.shape[2])
    batch, length, heads, width = k_BSHK.shape
    state = state_BHKV
    if state is None:
        state = v_BSHV.new_zeros(batch, heads, width, v_BSHV.shape[-1])
    outputs = []
    for s in range(length):
        if document_BS is not None and s > 0:
            continues_B = document_BS[:, s] == document_BS[:, s - 1]
            state = state * continues_B[:, None, None, None]
        state = state * decay_BSH[:, s, :, None, None].exp()
        error_BHV = v_BSHV[:, s] - torch.einsum("bhkv,bhk->bhv", state, k_BSHK[:, s])
        change_BHV = rate_BSH[:, s, :, None] * error_BHV
        state = state + torch.einsum("bhk,bhv->bhkv", k_BSHK[:, s], change_BHV)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q_BSHK[:, s]))
    return torch.stack(outputs, dim=1), state


def transition(
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    rate_BSH: Tensor,
    document_BS: Tensor | None = None,
) -> Tensor:
    """Return how the last state follows from the first, (B, H, K, V + K): side by side the last
    state if the first is zero, and the matrix M of which M times the first comes to it. Both are
    last states of the rule, whose columns do not depend on one another: M from the identity with
    values of zero."""
    values_BSHX = F.pad(v_BSHV, (0, k_BSGK.shape[-1]))
    start_BHKX = start_of_transition(v_BSHV[:, 0], k_BSGK.shape[-1])
    tokens = (k_BSGK, k_BSGK, values_BSHX, decay_BSH, rate_BSH)
    return gated_delta_rule(*tokens, document_BS, start_BHKX)[1]


def start_of_transition(v_BHV: Tensor, key_width: int) -> Tensor:
    """Return zeros as wide as these values beside the identity, (B, H, K, V + K)."""
    batch, heads, width = v_BHV.shape
    eye_KK = torch.eye(key_width, dtype=v_BHV.dtype, device=v_BHV.device)
    return F.pad(eye_KK, (width, 0)).expand(batch, heads, -1, -1)


def prepared(q_BSGK: Tensor, k_BSGK: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys of each of the H heads, with lengths of 1 / sqrt(K) and 1."""
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)).repeat_interleave(
            heads // x.shape[2], dim=2
        )
        for x in (q_BSGK, k_BSGK)
    )
    return q * q.shape[-1] ** -0.5, k
