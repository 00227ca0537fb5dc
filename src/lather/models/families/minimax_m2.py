"""MiniMax-M2: grouped-query attention with RMSNorm over all query heads and all key heads and a
rotary embedding of a part of each head; experts chosen by sigmoid scores plus a correction bias.

Source: the published code and weights of MiniMax-M2. Fields have the names and meanings of the
published Hugging Face `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, QueryKeyNorm
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.family import Family
from lather.models.moe import MoE
from lather.models.routing import CORRECTION_BIAS, Choice, Router
from lather.models.shared_fields import PartialRotaryFields, RouterLossFields


@dataclass(frozen=True)
class MiniMaxM2Config(PartialRotaryFields, RouterLossFields):
    """Sizes and options of a MiniMax-M2 model."""

    model_type: str = "minimax_m2"
    """Hugging Face name of the model family."""
    intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    num_local_experts: int = 8
    """Number of experts per block."""
    rope_theta: float = 5000000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_heads()
        self._require_at_most("num_experts_per_tok", "num_local_experts")


def _block(config: MiniMaxM2Config, index: int) -> Block:
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        qk_norm=QueryKeyNorm(config.rms_norm_eps, over_all_heads=True),
    )
    router = Router(
        config.hidden_size,
        config.num_local_experts,
        config.num_experts_per_tok,
        score="sigmoid",
        normalize=True,
        choice=Choice(correction_bias=True),
    )
    experts = Experts(config.num_local_experts, config.hidden_size, config.intermediate_size)
    return Block(attention, MoE(router, experts, None), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    MiniMaxM2Config,
    _block,
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "rope_theta": 5000000.0,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
    },
    written={
        "rotary_dim": lambda config: config.rotary.size,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    agreeing={
        "attention_bias": False,
        "attn_type_list": lambda config: [1] * config.num_hidden_layers,
        "qk_norm_type": "per_layer",
    },
    aliases={"num_experts": "num_local_experts"},
    # of multi-token prediction
    ignored=frozenset({"mtp_transformer_layers", "num_mtp_modules", "use_mtp"}),
    renamed={f".gate.{CORRECTION_BIAS}": f".{CORRECTION_BIAS}", ".mlp.": ".block_sparse_moe."},
    in_memory={f".gate.{CORRECTION_BIAS}": f".{CORRECTION_BIAS}"},
    expert_names=("w1", "w3", "w2"),
)
