"""OLMoE (arXiv:2409.02060): grouped-query attention with RMSNorm of queries and keys over all
heads, and experts in every block.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, HeadSizes, QueryKeyNorm
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.family import Family
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import Router
from lather.models.shared_fields import RouterLossFields


@dataclass(frozen=True)
class OlmoeConfig(RouterLossFields):
    """Sizes and options of an OLMoE model."""

    model_type: str = "olmoe"
    """Hugging Face name of the model family."""
    intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    num_key_value_heads: int = 6
    """Number of key-value heads; it divides the number of query heads."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""
    num_experts: int = 8
    """Number of experts per block."""
    norm_topk_prob: bool = False
    """Normalize the weights of a token's experts to a sum of 1."""
    rms_norm_eps: float = 1e-5
    """Constant added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        divides = self.hidden_size % (2 * self.num_attention_heads) == 0
        words = f"a divisor of hidden_size ({self.hidden_size}) that leaves an even width of a head"
        self._require("num_attention_heads", divides, words)
        self._require_divides("num_key_value_heads", "num_attention_heads")
        self._require_at_most("num_experts_per_tok", "num_experts")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


def _block(config: OlmoeConfig, index: int) -> Block:
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = GroupedQueryAttention(
        HeadSizes(hidden, heads, config.num_key_value_heads, config.head_dim),
        Rotary(config.head_dim, config.rope_theta, config.rope_scaling),
        qk_norm=QueryKeyNorm(config.rms_norm_eps, over_all_heads=True),
        bias=config.attention_bias,
        output_bias=config.attention_bias,
    )
    sizes = hidden, config.num_experts, config.num_experts_per_tok
    router = Router(*sizes, normalize=config.norm_topk_prob)
    experts = Experts(config.num_experts, hidden, config.intermediate_size)
    return Block(attention, MoE(router, experts, None), hidden, config.rms_norm_eps)


FAMILY = Family(
    OlmoeConfig,
    _block,
    architecture="OlmoeForCausalLM",
    defaults={
        "num_key_value_heads": lambda fields: fields["num_attention_heads"],
        "attention_bias": False,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "rms_norm_eps": 1e-5,
    },
    agreeing={
        "head_dim": lambda config: config.head_dim,
        "clip_qkv": None,  # 0 would clip to 0
        **dict.fromkeys(("qk_layernorm", "qk_norm", "use_qk_norm"), True),
    },
    aliases={"num_local_experts": "num_experts"},
)
