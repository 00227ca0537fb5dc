"""dots.llm1 (arXiv:2506.05767): grouped-query attention with RMSNorm of queries and keys, and the
experts of DeepSeek-V3.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.decoder import Block
from lather.models.family import Family
from lather.models.shared_fields import DeepseekExpertsFields, GroupedQueryFields, head_dim_of


@dataclass(frozen=True)
class Dots1Config(GroupedQueryFields, DeepseekExpertsFields):
    """Sizes and options of a dots.llm1 model."""

    model_type: str = "dots1"
    """Hugging Face name of the model family."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("first_k_dense_replace", "n_shared_experts"))
        self._require_heads()
        self._require_experts()


def _block(config: Dots1Config, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    return Block(attention, config.feed_forward(index), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    Dots1Config,
    _block,
    architecture="Dots1ForCausalLM",
    defaults={
        "head_dim": head_dim_of,
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
    },
    written={"sliding_window": None, "scoring_func": "sigmoid"},
    agreeing={"moe_layer_freq": 1, "topk_method": "noaux_tc", "qk_layernorm": True},
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    # without sliding_window it has no influence
    ignored=frozenset({"max_window_layers"}),
)
