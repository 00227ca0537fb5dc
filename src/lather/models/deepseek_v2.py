"""DeepSeek-V2 (arXiv:2405.04434): multi-head latent attention, leading dense layers, then mixture-of-experts layers with shared experts.

Field names and defaults of meaning are those of the published Hugging Face `config.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lather.errors import require
from lather.models.decoder import Block, Decoder
from lather.models.layers import GatedMLP, MultiHeadLatentAttention
from lather.models.moe import Experts, MoE, Router


@dataclass(frozen=True)
class DeepseekV2Config:
    """Sizes of a DeepSeek-V2 style model."""

    vocab_size: int = 4096
    """Tokens in the vocabulary."""
    hidden_size: int = 192
    """Width of the residual stream."""
    intermediate_size: int = 512
    """Width of the dense layers' feed-forward."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward."""
    num_hidden_layers: int = 6
    """Blocks, dense ones included."""
    first_k_dense_replace: int = 1
    """Leading blocks that are dense."""
    num_attention_heads: int = 6
    """Attention heads."""
    q_lora_rank: int | None = None
    """Rank of the query latent; none: the query is projected directly."""
    kv_lora_rank: int = 64
    """Rank of the latent that keys and values come from."""
    qk_nope_head_dim: int = 32
    """Width of a head's query and key without position."""
    qk_rope_head_dim: int = 16
    """Width of a head's rotary query and key, even."""
    v_head_dim: int = 32
    """Width of a head's value."""
    n_routed_experts: int = 8
    """Routed experts per MoE block."""
    n_shared_experts: int = 1
    """Shared experts per MoE block, as one feed-forward of that many times `moe_intermediate_size`; 0: none."""
    num_experts_per_tok: int = 2
    """Routed experts per token (top-k)."""
    norm_topk_prob: bool = False
    """Scale the chosen experts' weights to sum 1 instead of by `routed_scaling_factor`, if there are several."""
    routed_scaling_factor: float = 1.0
    """Factor on the chosen experts' weights."""
    aux_loss_alpha: float = 0.001
    """Coefficient of each block's load-balancing loss; 0: none."""
    max_position_embeddings: int = 2048
    """Longest sequence, tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        at_least_one = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "n_routed_experts",
            "num_experts_per_tok",
            "max_position_embeddings",
        )
        for name in at_least_one:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("first_k_dense_replace", "n_shared_experts"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("routed_scaling_factor", "rope_theta", "rms_norm_eps", "initializer_range"):
            self._require(name, 0 < getattr(self, name) < math.inf, "greater than 0 and finite")
        self._require("aux_loss_alpha", 0 <= self.aux_loss_alpha < math.inf, "at least 0 and finite")
        self._require("q_lora_rank", self.q_lora_rank is None or self.q_lora_rank >= 1, "at least 1, or left out")
        self._require("qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "even: rotary embedding turns pairs")
        self._require(
            "first_k_dense_replace",
            self.first_k_dense_replace <= self.num_hidden_layers,
            f"at most num_hidden_layers ({self.num_hidden_layers})",
        )
        self._require(
            "num_experts_per_tok",
            self.num_experts_per_tok <= self.n_routed_experts,
            f"at most n_routed_experts ({self.n_routed_experts}): lower the one or raise the other",
        )

    def _require(self, name: str, holds: bool, constraint: str) -> None:
        require(holds, f"model.{name}", getattr(self, name), constraint)


def build_deepseek_v2(config: DeepseekV2Config, generator: torch.Generator, device: torch.device | None = None) -> Decoder:
    """The model with fresh weights drawn from `generator`, on `device`; the draw is made on CPU, so that it is the same everywhere."""
    blocks = [_block(config, is_dense=index < config.first_k_dense_replace) for index in range(config.num_hidden_layers)]
    decoder = Decoder(
        blocks,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    decoder.init_weights(config.initializer_range, generator)
    return decoder.to(device)


def _block(config: DeepseekV2Config, *, is_dense: bool) -> Block:
    attention = MultiHeadLatentAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rope_theta=config.rope_theta,
    )
    mlp = GatedMLP(config.hidden_size, config.intermediate_size) if is_dense else _moe(config)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


def _moe(config: DeepseekV2Config) -> MoE:
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    width = config.n_shared_experts * config.moe_intermediate_size
    return MoE(router, experts, GatedMLP(config.hidden_size, width) if width else None)
