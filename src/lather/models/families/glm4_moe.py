"""GLM-4.5 (arXiv:2508.06471) and models of the same form: grouped-query attention with a rotary
embedding of a part of each head, and the experts of DeepSeek-V3.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.block import Block
from lather.models.family import Family
from lather.models.shared_fields import (
    DeepseekExpertsFields,
    MultiTokenFields,
    PartialRotaryFields,
    head_dim_of,
)


@dataclass(frozen=True)
class Glm4MoeConfig(MultiTokenFields, PartialRotaryFields, DeepseekExpertsFields):
    """Sizes and options of a GLM-4.5 model."""

    model_type: str = "glm4_moe"
    """Hugging Face name of the model family."""
    attention_bias: bool = False
    """Add biases to attention's projections of queries, keys and values."""
    use_qk_norm: bool = False
    """Normalize each head's query and key."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("first_k_dense_replace", "n_shared_experts"))
        self._require_heads()
        self._require_experts()


def _block(config: Glm4MoeConfig, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps) if config.use_qk_norm else None,
        bias=config.attention_bias,
    )
    return Block(attention, config.feed_forward(index), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    Glm4MoeConfig,
    _block,
    architecture="Glm4MoeForCausalLM",
    defaults={
        "head_dim": head_dim_of,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
    },
    agreeing={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    ignored=frozenset({"num_mtp_layers"}),
)
