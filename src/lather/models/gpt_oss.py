"""GPT-OSS (arXiv:2508.10925): grouped-query attention with sinks, a sliding window in some blocks,
experts with biases and a clamped gate.

Fields have the names and meanings of the published Hugging Face `config.json`. The experts' columns
for gate and up alternate, as in the published weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lather.errors import ConfigError
from lather.kernels.swiglu import Gate
from lather.models.attention import GroupedQueryAttention
from lather.models.decoder import Block, Decoder, assemble
from lather.models.experts import Experts
from lather.models.hf.config_fields import CheckedFields, PublishedConfig
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import Router

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class GptOssConfig(CheckedFields):
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
    num_key_value_heads: int = 2
    """Number of key-value heads; it divides the number of query heads."""
    head_dim: int = 32
    """Width of a head; even."""
    attention_bias: bool = True
    """Add biases to attention's four projections."""
    num_local_experts: int = 8
    """Number of experts per block."""
    swiglu_alpha: float = 1.702
    """Factor inside the gate's sigmoid."""
    swiglu_limit: float = 7.0
    """Limit to which gate values are clamped from above, and up values on both sides."""
    router_aux_loss_coef: float = 0.03
    """Coefficient of the published load-balancing loss, a mean over blocks that is
    `num_experts_per_tok` for an even load; 0: no such loss. Published models, which are large, have
    0.001 or less; small ones collapse with it."""
    rope_theta: float = 150000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Constant added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_rotary("head_dim")
        self._require_divides("num_key_value_heads", "num_attention_heads")
        self._require_at_most("num_experts_per_tok", "num_local_experts")
        if self.layer_types is not None:
            known = all(kind in (SLIDING, FULL) for kind in self.layer_types)
            self._require("layer_types", known, f"made of {SLIDING!r} and {FULL!r}")
            given, count = len(self.layer_types), self.num_hidden_layers
            if given != count:
                raise ConfigError(
                    f"model.layer_types has {given} entries, but model.num_hidden_layers is "
                    f"{count}: "
                    "give one for each layer, or leave layer_types out to have them alternate"
                )
            if self.layer_types == _alternating(count):
                object.__setattr__(self, "layer_types", None)

    @property
    def balance_loss_coef(self) -> float:
        """Coefficient of each block's own load-balancing loss, which is 1 for an even load."""
        return self.router_aux_loss_coef * self.num_experts_per_tok / self.num_hidden_layers

    @property
    def attention_types(self) -> tuple[str, ...]:
        """The attention of each block, also if `layer_types` is left out."""
        return self.layer_types or _alternating(self.num_hidden_layers)

    def window(self, index: int) -> int | None:
        """Return the window of block `index` (counted from 0); None: a token attends to all earlier
        ones."""
        return self.sliding_window if self.attention_types[index] == SLIDING else None


def _alternating(count: int) -> tuple[str, ...]:
    return tuple((SLIDING, FULL)[index % 2] for index in range(count))


PUBLISHED = PublishedConfig(
    architecture="GptOssForCausalLM",
    optional=frozenset({"layer_types", "attention_bias", "swiglu_alpha", "swiglu_limit"}),
    defaults={"router_aux_loss_coef": 0.001},
    derived={
        "layer_types": lambda config: list(config.attention_types),
        "experts_per_token": lambda config: config.num_experts_per_tok,
    },
    agreeing={
        "qkv_bias": lambda config: (config.attention_bias,),
        "moe_intermediate_size": lambda config: (config.intermediate_size,),
        "norm_topk_prob": (True,),
        "use_sliding_window": (True,),
    },
    aliases={"num_experts": "num_local_experts"},
    ignored=frozenset({"initial_context_length"}),
    quantization="mxfp4",
    rope_scaling_required=True,
)


def build_gpt_oss(
    config: GptOssConfig,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Decoder:
    """Build the model on `device`, with weights drawn from `generator` on CPU, so that they are the
    same on every device."""
    return assemble(config, lambda index: _block(config, config.window(index)), generator, device)


def _block(config: GptOssConfig, window: int | None) -> Block:
    attention = GroupedQueryAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        rotary=Rotary(config.head_dim, config.rope_theta, config.rope_scaling),
        bias=config.attention_bias,
        window=window,
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
