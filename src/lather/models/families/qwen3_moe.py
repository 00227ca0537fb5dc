"""Qwen3-MoE (arXiv:2505.09388): grouped-query attention with RMSNorm of queries and keys,
mixture-of-experts blocks without shared experts.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.decoder import Block
from lather.models.experts import Experts
from lather.models.family import Family
from lather.models.layers import GatedMLP
from lather.models.moe import MoE
from lather.models.routing import Router
from lather.models.shared_fields import GroupedQueryFields, RouterLossFields, head_dim_of


@dataclass(frozen=True)
class Qwen3MoeConfig(GroupedQueryFields, RouterLossFields):
    """Sizes and options of a Qwen3-MoE model."""

    model_type: str = "qwen3_moe"
    """Hugging Face name of the model family."""
    intermediate_size: int = 512
    """Width of the feed-forward layer of dense blocks."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    decoder_sparse_step: int = 1
    """Every n-th block has experts, where n is this number; the other blocks are dense."""
    mlp_only_layers: tuple[int, ...] = ()
    """Numbers, from 0, of additional dense blocks."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""
    num_experts: int = 8
    """Number of experts per MoE block."""
    norm_topk_prob: bool = True
    """Normalize the weights of a token's experts to a sum of 1."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_heads()
        self._require_at_most("num_experts_per_tok", "num_experts")
        last, numbers = self.num_hidden_layers - 1, self.mlp_only_layers
        different = len(set(numbers)) == len(numbers) and all(0 <= n <= last for n in numbers)
        self._require("mlp_only_layers", different, f"different blocks from 0 to {last}")

    def is_dense(self, index: int) -> bool:
        return index in self.mlp_only_layers or (index + 1) % self.decoder_sparse_step != 0


def _block(config: Qwen3MoeConfig, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    is_dense = config.is_dense(index)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size) if is_dense else _moe(config)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


def _moe(config: Qwen3MoeConfig) -> MoE:
    router = Router(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
    )
    experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
    return MoE(router, experts, None)


FAMILY = Family(
    Qwen3MoeConfig,
    _block,
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "head_dim": head_dim_of,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
    },
    written={"use_sliding_window": False},
    agreeing={
        "qkv_bias": lambda config: config.attention_bias,
        **dict.fromkeys(("qk_layernorm", "qk_norm", "use_qk_norm"), True),
    },
    aliases={"num_local_experts": "num_experts"},
    # without use_sliding_window they have no influence
    ignored=frozenset({"max_window_layers", "sliding_window"}),
)
