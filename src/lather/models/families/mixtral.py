"""Mixtral (arXiv:2401.04088): grouped-query attention, in some models with a sliding window, and
experts in every block, with normalized weights.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.families.mistral import MistralConfig
from lather.models.family import Family
from lather.models.moe import MoE
from lather.models.routing import Router
from lather.models.shared_fields import RouterLossFields, head_dim_of


@dataclass(frozen=True)
class MixtralConfig(MistralConfig, RouterLossFields):
    """Sizes and options of a Mixtral model."""

    model_type: str = "mixtral"
    """Hugging Face name of the model family."""
    intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    num_local_experts: int = 8
    """Number of experts per block."""
    rope_theta: float = 1e6
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Constant added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_heads()
        self._require_at_most("num_experts_per_tok", "num_local_experts")


def _block(config: MixtralConfig, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes, config.rotary, window=config.sliding_window
    )
    sizes = config.hidden_size, config.num_local_experts, config.num_experts_per_tok
    router = Router(*sizes, normalize=True)
    experts = Experts(config.num_local_experts, config.hidden_size, config.intermediate_size)
    return Block(attention, MoE(router, experts, None), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    MixtralConfig,
    _block,
    architecture="MixtralForCausalLM",
    defaults={
        "num_key_value_heads": lambda fields: fields["num_attention_heads"],
        "head_dim": head_dim_of,
        "sliding_window": None,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
    },
    agreeing={"norm_topk_prob": True},
    aliases={"num_experts": "num_local_experts"},
    renamed={".mlp.": ".block_sparse_moe."},
    expert_names=("w1", "w3", "w2"),
)
