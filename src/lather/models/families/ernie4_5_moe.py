"""ERNIE 4.5 MoE: grouped-query attention that rotates pairs of neighboring coordinates; softmax
scores, and a correction bias for the choice of experts; shared experts.

Source: the ERNIE 4.5 technical report and transformers. Fields have the names and meanings of the
published Hugging Face `config.json`, but for `moe_k`, which is `num_experts_per_tok`. The published
weights for multi-token prediction are left out, as by transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lather.models.attention import GroupedQueryAttention
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.family import Family
from lather.models.gated_mlp import GatedMLP
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import CORRECTION_BIAS, Choice, Router
from lather.models.shared_fields import GroupedQueryFields, RouterLossFields, head_dim_of


@dataclass(frozen=True)
class Ernie45MoeConfig(GroupedQueryFields, RouterLossFields):
    """Sizes and options of an ERNIE 4.5 MoE model."""

    model_type: str = "ernie4_5_moe"
    """Hugging Face name of the model family."""
    intermediate_size: int = 512
    """Width of the feed-forward layer of dense blocks."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    moe_num_experts: int = 8
    """Number of routed experts per MoE block."""
    moe_num_shared_experts: int = 1
    """Number of shared experts per MoE block, merged into one feed-forward layer of this multiple
    of `moe_intermediate_size`; 0: none."""
    moe_layer_start_index: int = 1
    """Number of the first block, counted from 0, that may have experts."""
    moe_layer_end_index: int | None = None
    """Number of the last block that may have experts; left out or -1: the last of all."""
    moe_layer_interval: int = 1
    """Every n-th block has experts, where n is this number; the other blocks are dense."""
    moe_norm_min: float = 1e-12
    """A token's weights are divided by their sum, or by this number if it is greater."""
    rope_theta: float = 500000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Constant added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        if self.moe_layer_end_index in (-1, self.num_hidden_layers - 1):
            object.__setattr__(self, "moe_layer_end_index", None)
        self._require_family_and_ranges(
            may_be_zero=(
                "moe_layer_start_index",
                "moe_layer_end_index",
                "moe_num_shared_experts",
                "router_aux_loss_coef",
            )
        )
        self._require_heads()
        self._require_at_most("num_experts_per_tok", "moe_num_experts")

    @property
    def rotary(self) -> Rotary:
        return replace(super().rotary, interleaved=True)

    def is_dense(self, index: int) -> bool:
        end = self.moe_layer_end_index
        is_within = self.moe_layer_start_index <= index and (end is None or index <= end)
        return not is_within or (index + 1) % self.moe_layer_interval != 0


def _block(config: Ernie45MoeConfig, index: int) -> Block:
    attention = GroupedQueryAttention(config.head_sizes, config.rotary)
    is_dense = config.is_dense(index)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size) if is_dense else _moe(config)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


def _moe(config: Ernie45MoeConfig) -> MoE:
    router = Router(
        config.hidden_size,
        config.moe_num_experts,
        config.num_experts_per_tok,
        normalize=True,
        choice=Choice(correction_bias=True),
    )
    router.least_sum = config.moe_norm_min
    experts = Experts(config.moe_num_experts, config.hidden_size, config.moe_intermediate_size)
    width = config.moe_num_shared_experts * config.moe_intermediate_size
    return MoE(router, experts, GatedMLP(config.hidden_size, width) if width else None)


FAMILY = Family(
    Ernie45MoeConfig,
    _block,
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        "head_dim": head_dim_of,
        "tie_word_embeddings": True,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": None,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
    },
    written={"moe_k": lambda config: config.num_experts_per_tok},
    agreeing={"moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
    aliases={"moe_k": "num_experts_per_tok", "num_experts": "moe_num_experts"},
    ignored=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
    left_out=r"model\.mtp_.*",
    renamed={f".gate.{CORRECTION_BIAS}": f".moe_statics.{CORRECTION_BIAS}"},
    in_memory={f".gate.{CORRECTION_BIAS}": f".gate.moe_statics.{CORRECTION_BIAS}"},
    unsqueezed={CORRECTION_BIAS: 0},
)
