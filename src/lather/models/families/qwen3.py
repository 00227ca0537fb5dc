"""Qwen3 (arXiv:2505.09388), the dense models: grouped-query attention with RMSNorm of queries and
keys.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.block import Block
from lather.models.family import Family
from lather.models.shared_fields import DenseFields


@dataclass(frozen=True)
class Qwen3Config(DenseFields):
    """Sizes and options of a Qwen3 model."""

    model_type: str = "qwen3"
    """Hugging Face name of the model family."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""


def _block(config: Qwen3Config, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    return config.dense_block(attention)


FAMILY = Family(
    Qwen3Config,
    _block,
    architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128, "attention_bias": False, "rms_norm_eps": 1e-6},
    written={"use_sliding_window": False},
    # without use_sliding_window they have no influence
    ignored=frozenset({"max_window_layers", "sliding_window"}),
)
