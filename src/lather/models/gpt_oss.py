"""GPT-OSS (arXiv:2508.10925): grouped-query attention with sinks, a sliding window on some layers, experts with biases and a clamped gate.

Field names and defaults of meaning are those of the published Hugging Face `config.json`. Gate and up columns of the experts alternate, as
in the published weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lather.errors import ConfigError
from lather.kernels.swiglu import Gate
from lather.models.assembly import assemble
from lather.models.attention import GroupedQueryAttention
from lather.models.decoder import Block, Decoder
from lather.models.experts import Experts
from lather.models.hf.config_fields import CheckedFields, PublishedConfig
from lather.models.moe import MoE
from lather.models.rotary import Rotary, YarnConfig
from lather.models.routing import Router

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class GptOssConfig(CheckedFields):
    """Sizes of a GPT-OSS style model."""

    model_type: str = "gpt_oss"
    """The family, by its Hugging Face name."""
    vocab_size: int = 4096
    """Tokens in the vocabulary."""
    hidden_size: int = 192
    """Width of the residual stream."""
    intermediate_size: int = 128
    """Width of one expert's feed-forward."""
    num_hidden_layers: int = 6
    """Blocks."""
    layer_types: tuple[str, ...] | None = None
    """Attention of each block, sliding_attention or full_attention; left out: alternating, sliding first. A list that says the same counts
    as left out, so that the number of blocks can be changed alone."""
    sliding_window: int = 128
    """Tokens that sliding attention sees, itself included."""
    num_attention_heads: int = 6
    """Heads of queries."""
    num_key_value_heads: int = 2
    """Heads of keys and values, a divisor of the heads of queries."""
    head_dim: int = 32
    """Width of a head, even."""
    attention_bias: bool = True
    """Biases on attention's four projections."""
    num_local_experts: int = 8
    """Experts per block."""
    num_experts_per_tok: int = 2
    """Experts per token (top-k)."""
    swiglu_alpha: float = 1.702
    """Gain inside the gate's sigmoid."""
    swiglu_limit: float = 7.0
    """Gate values are clamped above, up values on both sides, to this."""
    router_aux_loss_coef: float = 0.001
    """Coefficient of the published load-balancing loss, a mean over blocks that is `num_experts_per_tok` when the load is even; 0: none."""
    max_position_embeddings: int = 2048
    """Longest sequence, tokens."""
    rope_theta: float = 150000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """Stretching of the positions by YaRN; left out: none."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("router_aux_loss_coef",))
        self._require_rotary("head_dim", self.rope_scaling)
        self._require_divides("num_key_value_heads", "num_attention_heads")
        self._require_at_most("num_experts_per_tok", "num_local_experts")
        if self.layer_types is not None:
            known = all(kind in (SLIDING, FULL) for kind in self.layer_types)
            self._require("layer_types", known, f"made of {SLIDING!r} and {FULL!r}")
            given, count = len(self.layer_types), self.num_hidden_layers
            if given != count:
                raise ConfigError(
                    f"model.layer_types has {given} entries, but model.num_hidden_layers is {count}: "
                    "give one for each layer, or leave layer_types out to have them alternate"
                )
            if self.layer_types == _alternating(count):
                object.__setattr__(self, "layer_types", None)

    @property
    def balance_loss_coef(self) -> float:
        """Coefficient of each block's load-balancing loss, which is 1 when the load is even."""
        return self.router_aux_loss_coef * self.num_experts_per_tok / self.num_hidden_layers

    @property
    def attention_types(self) -> tuple[str, ...]:
        """The attention of each block, also where `layer_types` is left out."""
        return self.layer_types or _alternating(self.num_hidden_layers)

    def window(self, index: int) -> int | None:
        """Tokens that this block's attention, counted from 0, sees; None: all earlier ones."""
        return self.sliding_window if self.attention_types[index] == SLIDING else None


def _alternating(count: int) -> tuple[str, ...]:
    return tuple((SLIDING, FULL)[index % 2] for index in range(count))


PUBLISHED = PublishedConfig(
    architecture="GptOssForCausalLM",
    defaults={
        "layer_types": None,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    fixed={"hidden_act": ("silu",), "attention_dropout": (0.0,)},
    derived={
        "layer_types": lambda config: list(config.attention_types),
        "experts_per_token": lambda config: config.num_experts_per_tok,
    },
    aliases={"num_experts": "num_local_experts"},
    ignored=frozenset({"initial_context_length"}),
    quantization="mxfp4",
    rope_scaling_required=True,
)


def build_gpt_oss(config: GptOssConfig, generator: torch.Generator | None = None, device: torch.device | None = None) -> Decoder:
    """The model with fresh weights drawn from `generator`, on `device`; the draw is made on CPU, so that it is the same everywhere."""
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
    router = Router(config.hidden_size, config.num_local_experts, config.num_experts_per_tok, normalize=True, bias=True)
    gate = Gate(alpha=config.swiglu_alpha, offset=1.0, limit=config.swiglu_limit, interleaved=True)
    experts = Experts(config.num_local_experts, config.hidden_size, config.intermediate_size, gate=gate, bias=True)
    return Block(attention, MoE(router, experts, None), config.hidden_size, config.rms_norm_eps)
