"""Layers shared by the model families: RMSNorm, rotary embedding, multi-head latent attention, gated MLP.

Sources: RMSNorm (Zhang and Sennrich, arXiv:1910.07467); RoPE (Su et al., arXiv:2104.09864), on interleaved pairs as DeepSeek-V2 has it;
multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its plain training form: keys and values are expanded
from the latent, so that attention itself is an ordinary one.

Letters: B sequences, S positions, D hidden size, H heads, N non-rotary and R rotary width of a head's query and key, U width of a head's
value, L rank of the key-value latent, Q rank of the query latent, F intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.shapes import Float

LATENT_EPS = 1e-6
"""The latents' norms have this eps in the published models, whatever `rms_norm_eps` is."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_angles(num_positions: int, size: int, theta: float, device: torch.device) -> Float[Tensor, "s half"]:
    """Angle of each position for each of the size/2 pairs: position * theta^(-2i/size), in fp64 so that it is right to the last bit."""
    frequency = theta ** -(torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
    return torch.outer(torch.arange(num_positions, dtype=torch.float64, device=device), frequency)


def rotate_pairs(x_BSHR: Float[Tensor, "b s h r"], angles_SP: Float[Tensor, "s p"]) -> Float[Tensor, "b s h r"]:
    """Turn each interleaved pair (x_2i, x_2i+1) of a head by its position's angle, in fp32 or wider."""
    wide = torch.promote_types(x_BSHR.dtype, torch.float32)
    cos, sin = angles_SP.cos()[:, None].to(wide), angles_SP.sin()[:, None].to(wide)
    even, odd = x_BSHR.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BSHR.dtype)


def causal_attention(
    q_BSHN: Float[Tensor, "b s h n"], k_BSHN: Float[Tensor, "b s h n"], v_BSHU: Float[Tensor, "b s h u"]
) -> Float[Tensor, "b s h u"]:
    """softmax(q k^T / sqrt(N)) v over earlier positions. Narrower values are padded: torch's fused kernels want equal widths."""
    padded = F.pad(v_BSHU, (0, q_BSHN.shape[-1] - v_BSHU.shape[-1])) if v_BSHU.shape[-1] < q_BSHN.shape[-1] else v_BSHU
    y_BHSN = F.scaled_dot_product_attention(q_BSHN.transpose(1, 2), k_BSHN.transpose(1, 2), padded.transpose(1, 2), is_causal=True)
    return y_BHSN.transpose(1, 2)[..., : v_BSHU.shape[-1]]


class MultiHeadLatentAttention(nn.Module):
    """Causal attention whose keys and values come from a low-rank latent, with one rotary key shared by all heads.

    Sizes are those of the published configuration (Hugging Face names). With `q_lora_rank` None the query has no latent.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.nope, self.rope, self.rope_theta = qk_nope_head_dim, qk_rope_head_dim, rope_theta
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        query_size = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(q_lora_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False)

    def forward(self, x_BSD: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d"]:
        angles = rotary_angles(x_BSD.shape[1], self.rope, self.rope_theta, x_BSD.device)
        q_BSHN, q_BSHR = self._heads(self._query(x_BSD)).split((self.nope, self.rope), dim=-1)
        latent_BSL, k_BSR = self.kv_a_proj_with_mqa(x_BSD).split((self.kv_lora_rank, self.rope), dim=-1)
        kv_BSHx = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent_BSL)))
        k_BSHN, v_BSHU = kv_BSHx.split((self.nope, kv_BSHx.shape[-1] - self.nope), dim=-1)
        k_BSHR = rotate_pairs(k_BSR.unsqueeze(2), angles).expand(-1, -1, self.num_heads, -1)

        query = torch.cat((q_BSHN, rotate_pairs(q_BSHR, angles)), dim=-1)
        key = torch.cat((k_BSHN, k_BSHR), dim=-1)
        attended_BSHU = causal_attention(query, key, v_BSHU)
        y_BSD: Tensor = self.o_proj(attended_BSHU.flatten(2))
        return y_BSD

    def _query(self, x_BSD: Tensor) -> Tensor:
        query: Tensor
        query = self.q_proj(x_BSD) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        return query

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): the dense feed-forward layer, and the shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
