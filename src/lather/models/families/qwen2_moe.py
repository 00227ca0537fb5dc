"""Qwen2-MoE (arXiv:2407.10671), as in Qwen1.5-MoE: grouped-query attention with biases of queries,
keys and values, routed experts and a gated shared expert.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention
from lather.models.block import Block
from lather.models.family import FULL_ATTENTION, SLIDING_ATTENTION, Family
from lather.models.shared_fields import GroupedQueryFields, SparseStepFields, head_dim_of


@dataclass(frozen=True)
class Qwen2MoeConfig(GroupedQueryFields, SparseStepFields):
    """Sizes and options of a Qwen2-MoE model."""

    model_type: str = "qwen2_moe"
    """Hugging Face name of the model family."""
    shared_expert_intermediate_size: int = 256
    """Width of the shared expert's feed-forward layer."""
    qkv_bias: bool = True
    """Add biases to the projections of queries, keys and values."""
    norm_topk_prob: bool = False
    """Normalize the weights of a token's experts to a sum of 1."""
    use_sliding_window: bool = False
    """Use sliding attention in every second of the first `max_window_layers` blocks, from the first
    on."""
    sliding_window: int = 0
    """Number of tokens that a token attends to in sliding attention, including itself; 0 without
    `use_sliding_window`."""
    max_window_layers: int = 28
    """Number of blocks among which some have sliding attention."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(
            may_be_zero=("router_aux_loss_coef", "max_window_layers", "sliding_window")
        )
        self._require_heads()
        self._require_experts()
        window, is_used = self.sliding_window, self.use_sliding_window
        self._require("sliding_window", window > 0 or not is_used, "at least 1, to be used")
        object.__setattr__(self, "sliding_window", window if is_used else 0)

    @property
    def attention_types(self) -> tuple[str, ...]:
        last = self.max_window_layers if self.use_sliding_window else 0
        return tuple(
            SLIDING_ATTENTION if index % 2 == 0 and index < last else FULL_ATTENTION
            for index in range(self.num_hidden_layers)
        )


def _block(config: Qwen2MoeConfig, index: int) -> Block:
    is_sliding = config.attention_types[index] == SLIDING_ATTENTION
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        bias=config.qkv_bias,
        window=config.sliding_window if is_sliding else None,
    )
    mlp = config.feed_forward(index, config.shared_expert_intermediate_size)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    Qwen2MoeConfig,
    _block,
    architecture="Qwen2MoeForCausalLM",
    defaults={
        "num_key_value_heads": lambda fields: fields["num_attention_heads"],
        "head_dim": head_dim_of,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    aliases={"num_local_experts": "num_experts"},
    renamed={".mlp.shared_experts.": ".mlp.shared_expert."},
)
