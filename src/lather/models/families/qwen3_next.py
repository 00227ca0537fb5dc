"""Qwen3-Next: three blocks of Gated DeltaNet (arXiv:2412.06464) and one of gated attention
(arXiv:2505.06708) in turn, zero-centered norms, experts with a gated shared expert.

Fields have the names and meanings of the published Hugging Face `config.json`. The published
weights for multi-token prediction are left out, as by transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.block import Block
from lather.models.delta_net import DeltaSizes, GatedDeltaNet
from lather.models.families.qwen3_moe import Qwen3MoeConfig
from lather.models.family import FULL_ATTENTION, Family
from lather.models.shared_fields import PartialRotaryFields

LINEAR_ATTENTION = "linear_attention"
"""transformers' word for Gated DeltaNet."""


@dataclass(frozen=True)
class DeltaNetFields(PartialRotaryFields):
    """Fields of models with blocks of Gated DeltaNet among those with gated attention."""

    head_dim: int = 64
    """Width of a head of attention; even."""
    partial_rotary_factor: float = 0.25
    """Share of each head's columns, the first, that the rotary embedding covers."""
    layer_types: tuple[str, ...] | None = None
    """Attention of each block, linear_attention (Gated DeltaNet) or full_attention; left out: by
    `full_attention_interval`. A list that an interval describes is treated as left out, so that the
    number of blocks can be changed without it."""
    full_attention_interval: int = 4
    """Every n-th block has full attention, where n is this number; the others Gated DeltaNet."""
    linear_num_key_heads: int = 2
    """Number of query and key heads of Gated DeltaNet; it divides that of value heads."""
    linear_num_value_heads: int = 4
    """Number of value heads of Gated DeltaNet."""
    linear_key_head_dim: int = 32
    """Width of a query and key head of Gated DeltaNet."""
    linear_value_head_dim: int = 32
    """Width of a value head of Gated DeltaNet."""
    linear_conv_kernel_dim: int = 4
    """Number of tokens that the convolution of Gated DeltaNet sees."""
    shared_expert_intermediate_size: int = 128
    """Width of the shared expert's feed-forward layer."""

    zero_centered_norms: ClassVar[bool] = True

    @property
    def attention_types(self) -> tuple[str, ...]:
        return self.layer_types or self._in_turn(self.full_attention_interval)

    @property
    def delta_sizes(self) -> DeltaSizes:
        return DeltaSizes(
            self.hidden_size,
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    def _in_turn(self, interval: int) -> tuple[str, ...]:
        return tuple(
            FULL_ATTENTION if number % interval == 0 else LINEAR_ATTENTION
            for number in range(1, self.num_hidden_layers + 1)
        )

    def _require_delta_net(self) -> None:
        self._require_divides("linear_num_key_heads", "linear_num_value_heads")
        types, count = self.layer_types, self.num_hidden_layers
        if types is not None:
            fits = len(types) == count and {*types} <= {LINEAR_ATTENTION, FULL_ATTENTION}
            words = f"{count} (num_hidden_layers) of {LINEAR_ATTENTION!r} or {FULL_ATTENTION!r}"
            self._require("layer_types", fits, words)
            intervals = (self.full_attention_interval, *range(1, count + 2))
            described = [interval for interval in intervals if self._in_turn(interval) == types]
            if described:
                object.__setattr__(self, "layer_types", None)
                object.__setattr__(self, "full_attention_interval", described[0])


@dataclass(frozen=True)
class Qwen3NextConfig(DeltaNetFields, Qwen3MoeConfig):
    """Sizes and options of a Qwen3-Next model."""

    model_type: str = "qwen3_next"
    """Hugging Face name of the model family."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_delta_net()


def attention_of(config: Any, index: int, *, grouped_projections: bool) -> Any:
    """Return the attention layer of a block; see `GatedDeltaNet` about `grouped_projections`."""
    if config.attention_types[index] == LINEAR_ATTENTION:
        sizes, eps = config.delta_sizes, config.rms_norm_eps
        return GatedDeltaNet(sizes, eps, grouped_projections=grouped_projections)
    return GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps, zero_centered=True),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        gate=True,
    )


def _block(config: Qwen3NextConfig, index: int) -> Block:
    attention = attention_of(config, index, grouped_projections=True)
    mlp = config.feed_forward(index, config.shared_expert_intermediate_size)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps, zero_centered=True)


DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "attention_bias": False,
    "router_aux_loss_coef": 0.001,
    "rms_norm_eps": 1e-6,
}
RENAMED = {
    f".self_attn.{part}": f".linear_attn.{part}"
    for part in ("in_proj_", "conv1d.", "A_log", "dt_bias", "norm.", "out_proj.")
} | {".shared_experts.": ".shared_expert."}
FAMILY = Family(
    Qwen3NextConfig,
    _block,
    architecture="Qwen3NextForCausalLM",
    defaults=DEFAULTS | {"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True},
    written={"layer_types": lambda config: list(config.attention_types)},
    agreeing={"attn_output_gate": True, "use_sliding_window": False},
    left_out=r"mtp\..*",
    renamed=RENAMED,
)
