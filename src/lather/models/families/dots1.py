"""dots.llm1 (arXiv:2506.05767): grouped-query attention with RMSNorm of queries and keys, and the
experts of DeepSeek-V3.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.block import Block
from lather.models.family import FULL_ATTENTION, SLIDING_ATTENTION, Family
from lather.models.shared_fields import DeepseekExpertsFields, GroupedQueryFields, head_dim_of


@dataclass(frozen=True)
class Dots1Config(GroupedQueryFields, DeepseekExpertsFields):
    """Sizes and options of a dots.llm1 model."""

    model_type: str = "dots1"
    """Hugging Face name of the model family."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, including itself, in the blocks from
    `max_window_layers` on; left out: all tokens before it."""
    max_window_layers: int = 62
    """Number of blocks at the start that attend to all tokens."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(
            may_be_zero=("first_k_dense_replace", "n_shared_experts", "max_window_layers")
        )
        self._require_heads()
        self._require_experts()

    @property
    def attention_types(self) -> tuple[str, ...]:
        whole = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
        return tuple(
            FULL_ATTENTION if index < whole else SLIDING_ATTENTION
            for index in range(self.num_hidden_layers)
        )


def _block(config: Dots1Config, index: int) -> Block:
    is_sliding = config.attention_types[index] == SLIDING_ATTENTION
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        window=config.sliding_window if is_sliding else None,
    )
    return Block(attention, config.feed_forward(index), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    Dots1Config,
    _block,
    architecture="Dots1ForCausalLM",
    defaults={
        "head_dim": head_dim_of,
        "attention_bias": False,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
    },
    nullable=frozenset({"sliding_window"}),
    written={"scoring_func": "sigmoid", "layer_types": lambda config: list(config.attention_types)},
    agreeing={"moe_layer_freq": 1, "topk_method": "noaux_tc", "qk_layernorm": True},
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
)
