"""Qwen3-MoE (arXiv:2505.09388): grouped-query attention with RMSNorm of queries and keys,
mixture-of-experts blocks without shared experts.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.block import Block
from lather.models.family import Family
from lather.models.shared_fields import GroupedQueryFields, SparseStepFields, head_dim_of


@dataclass(frozen=True)
class Qwen3MoeConfig(GroupedQueryFields, SparseStepFields):
    """Sizes and options of a Qwen3-MoE model."""

    model_type: str = "qwen3_moe"
    """Hugging Face name of the model family."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_heads()
        self._require_experts()


def _block(config: Qwen3MoeConfig, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    mlp = config.feed_forward(index)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


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
