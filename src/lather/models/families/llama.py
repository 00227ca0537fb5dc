"""Llama 2, 3.1 and 3.2 (arXiv:2307.09288, arXiv:2407.21783), and models of the same form:
grouped-query attention, dense blocks.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention
from lather.models.block import Block
from lather.models.family import Family
from lather.models.rotary import Llama3RopeConfig
from lather.models.shared_fields import DenseFields, head_dim_of


@dataclass(frozen=True)
class LlamaConfig(DenseFields):
    """Sizes and options of a Llama model."""

    model_type: str = "llama"
    """Hugging Face name of the model family."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""
    rope_scaling: Llama3RopeConfig | None = None  # type: ignore[assignment]
    """Llama 3's change of the rotary embedding for longer sequences; left out: none."""


def _block(config: LlamaConfig, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    return config.dense_block(attention)


FAMILY = Family(
    LlamaConfig,
    _block,
    architecture="LlamaForCausalLM",
    defaults={
        "num_key_value_heads": lambda fields: fields["num_attention_heads"],
        "head_dim": head_dim_of,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
)
