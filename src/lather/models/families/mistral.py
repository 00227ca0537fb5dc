"""Mistral (arXiv:2310.06825): grouped-query attention with a sliding window, dense blocks.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention
from lather.models.block import Block
from lather.models.family import FULL_ATTENTION, SLIDING_ATTENTION, Family
from lather.models.shared_fields import DenseFields, head_dim_of


@dataclass(frozen=True)
class MistralConfig(DenseFields):
    """Sizes and options of a Mistral model."""

    model_type: str = "mistral"
    """Hugging Face name of the model family."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, including itself; left out: all earlier tokens."""

    @property
    def attention_types(self) -> tuple[str, ...]:
        kind = FULL_ATTENTION if self.sliding_window is None else SLIDING_ATTENTION
        return (kind,) * self.num_hidden_layers


def _block(config: MistralConfig, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes, config.rotary, window=config.sliding_window
    )
    return config.dense_block(attention)


FAMILY = Family(
    MistralConfig,
    _block,
    architecture="MistralForCausalLM",
    defaults={"head_dim": head_dim_of, "rms_norm_eps": 1e-6},
    nullable=frozenset({"sliding_window"}),
)
