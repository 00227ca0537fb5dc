"""Qwen3.5-MoE, and Qwen3.6: the text model, which is Qwen3-Next's with separate projections of
Gated DeltaNet, experts in all blocks, and experts that are published as stacks.

The published folders (`qwen3_5_moe`) nest the text model's fields in `text_config` and hold images'
weights, which are left out, besides; `qwen3_5_moe_text` is the text model alone. All positions of
a text are the same in the three coordinates of the rotary embedding, which is therefore a plain
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.families.qwen3_next import DEFAULTS, RENAMED, DeltaNetFields, attention_of
from lather.models.family import Family
from lather.models.gated_mlp import GatedMLP
from lather.models.moe import MoE
from lather.models.routing import Router
from lather.models.shared_fields import RouterLossFields


@dataclass(frozen=True)
class Qwen35MoeConfig(DeltaNetFields, RouterLossFields):
    """Sizes and options of the text model of a Qwen3.5-MoE model."""

    model_type: str = "qwen3_5_moe"
    """Hugging Face name of the model family."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    attention_bias: bool = False
    """Add biases to attention's four projections."""
    num_experts: int = 8
    """Number of experts per block."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_heads()
        self._require_at_most("num_experts_per_tok", "num_experts")
        self._require_delta_net()


@dataclass(frozen=True)
class Qwen35MoeTextConfig(Qwen35MoeConfig):
    """The same, published as a text model."""

    model_type: str = "qwen3_5_moe_text"
    """Hugging Face name of the model family."""


def _block(config: Qwen35MoeConfig, index: int) -> Block:
    hidden = config.hidden_size
    attention = attention_of(config, index, grouped_projections=False)
    router = Router(hidden, config.num_experts, config.num_experts_per_tok, normalize=True)
    experts = Experts(config.num_experts, hidden, config.moe_intermediate_size)
    shared = GatedMLP(hidden, config.shared_expert_intermediate_size)
    mlp = MoE(router, experts, shared, gates_shared_experts=True)
    return Block(attention, mlp, hidden, config.rms_norm_eps, zero_centered=True)


TEXT = Family(
    Qwen35MoeTextConfig,
    _block,
    architecture="Qwen3_5MoeForCausalLM",
    defaults=DEFAULTS,
    written={"layer_types": lambda config: list(config.attention_types)},
    agreeing={
        **{"attn_output_gate": True, "norm_topk_prob": True, "use_sliding_window": False},
        **{"decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    ignored=frozenset(
        {
            *("mrope_interleaved", "mrope_section", "vision_config", "language_model_only"),
            *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
            *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
        }
    ),
    left_out=r"mtp\..*",
    renamed=RENAMED,
    stacks_experts=True,
)
FAMILY = replace(
    TEXT,
    config=Qwen35MoeConfig,
    text_field="text_config",
    other_architectures=("Qwen3_5MoeForConditionalGeneration",),
    prefix="model.language_model.",
    left_out=r"mtp\..*|model\.visual\..*",
)
