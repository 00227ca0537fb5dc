"""GPT-OSS (arXiv:2508.10925): grouped-query attention with sinks, a sliding window in alternate
blocks, experts with biases and a clamped gate.

Fields have the names and meanings of the published Hugging Face `config.json`. The experts' columns
for gate and up alternate, as in the published weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from lather.errors import ConfigError
from lather.kernels.swiglu import Gate
from lather.models.attention import GroupedQueryAttention
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.family import FULL_ATTENTION, SLIDING_ATTENTION, Family
from lather.models.moe import MoE
from lather.models.routing import Router
from lather.models.shared_fields import GroupedQueryFields, RouterLossFields


@dataclass(frozen=True)
class GptOssConfig(GroupedQueryFields, RouterLossFields):
    """Sizes and options of a GPT-OSS model."""

    model_type: str = "gpt_oss"
    """Hugging Face name of the model family."""
    intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    layer_types: tuple[str, ...] | None = None
    """Attention of each block, sliding_attention or full_attention; left out: alternating, sliding
    first. A list with just this alternation is treated as left out, so that the number of blocks
    can be changed without it."""
    sliding_window: int = 128
    """Number of tokens that a token attends to in sliding attention, including itself."""
    attention_bias: bool = True
    """Add biases to attention's four projections."""
    num_local_experts: int = 8
    """Number of experts per block."""
    swiglu_alpha: float = 1.702
    """Factor inside the gate's sigmoid."""
    swiglu_limit: float = 7.0
    """Limit to which gate values are clamped from above, and up values on both sides."""
    rope_theta: float = 150000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Constant added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_heads()
        self._require_at_most("num_experts_per_tok", "num_local_experts")
        if self.layer_types is not None:
            kinds, count = (SLIDING_ATTENTION, FULL_ATTENTION), self.num_hidden_layers
            known = all(kind in kinds for kind in self.layer_types)
            self._require("layer_types", known, f"made of {kinds[0]!r} and {kinds[1]!r}")
            if len(self.layer_types) != count:
                raise ConfigError(
                    f"model.layer_types has {len(self.layer_types)} entries, but "
                    f"model.num_hidden_layers is {count}: "
                    "give one for each layer, or leave layer_types out to have them alternate"
                )
            if self.layer_types == _alternating(count):
                object.__setattr__(self, "layer_types", None)

    @property
    def attention_types(self) -> tuple[str, ...]:
        return self.layer_types or _alternating(self.num_hidden_layers)


def _alternating(count: int) -> tuple[str, ...]:
    return tuple((SLIDING_ATTENTION, FULL_ATTENTION)[index % 2] for index in range(count))


def _block(config: GptOssConfig, index: int) -> Block:
    is_sliding = config.attention_types[index] == SLIDING_ATTENTION
    attention = GroupedQueryAttention(
        config.head_sizes,
        config.rotary,
        bias=config.attention_bias,
        output_bias=config.attention_bias,
        window=config.sliding_window if is_sliding else None,
        sinks=True,
    )
    router = Router(
        config.hidden_size,
        config.num_local_experts,
        config.num_experts_per_tok,
        normalize=True,
        bias=True,
    )
    gate = Gate(alpha=config.swiglu_alpha, offset=1.0, limit=config.swiglu_limit, interleaved=True)
    experts = Experts(
        config.num_local_experts, config.hidden_size, config.intermediate_size, gate=gate, bias=True
    )
    return Block(attention, MoE(router, experts, None), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    GptOssConfig,
    _block,
    architecture="GptOssForCausalLM",
    defaults={
        "layer_types": None,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
    },
    written={
        "layer_types": lambda config: list(config.attention_types),
        "experts_per_token": lambda config: config.num_experts_per_tok,
    },
    agreeing={
        "qkv_bias": lambda config: config.attention_bias,
        "moe_intermediate_size": lambda config: config.intermediate_size,
        "norm_topk_prob": True,
        "use_sliding_window": True,
    },
    aliases={"num_experts": "num_local_experts"},
    ignored=frozenset({"initial_context_length"}),
    quantization="mxfp4",
    rope_scaling_required=True,
    renamed={
        ".mlp.gate.": ".mlp.router.",
        ".gate_up_bias": ".gate_up_proj_bias",
        ".down_bias": ".down_proj_bias",
    },
    transposes_experts=True,
)
