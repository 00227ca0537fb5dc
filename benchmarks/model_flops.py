"""The model flops of a token, forward and backward: the useful work, of whose rate MFU is the share
of a device's peak.

    6 * (parameters that multiply a token) + 3 * layers * heads * S * (query width + value width)

A multiplication and an addition are two flops; backward costs twice the forward. The parameters
that multiply a token are the matrices without the embedding and with the head; of the routed
experts K of E count. Attention is causal: half of S x S. Recomputation, the optimizer and the
router's bookkeeping do not count.

Letters: S tokens of a sequence, E experts, K experts per token.
"""

from __future__ import annotations

from torch import nn

from lather.models.experts import Experts
from lather.models.families import ModelConfig
from lather.models.families.deepseek_v2 import DeepseekV2Config


def flops_per_token(
    layers: nn.Module, config: ModelConfig, length: int, num_layers: int | None = None
) -> float:
    """Compute the model flops of a token of a model, or of `num_layers` of its blocks, in a
    sequence of `length` tokens."""
    multiplying = 0.0
    for module in layers.modules():
        if isinstance(module, nn.Embedding):
            continue
        is_expert = isinstance(module, Experts)
        share = config.num_experts_per_tok / config.num_routed_experts if is_expert else 1.0
        own = module.parameters(recurse=False)
        multiplying += share * sum(p.numel() for p in own if p.dim() > 1)
    heads = config.num_attention_heads * (num_layers or config.num_hidden_layers)
    return 6 * multiplying + 3 * length * heads * _widths(config)


def _widths(config: ModelConfig) -> int:
    """Return the width of a head's query and of its value together."""
    if isinstance(config, DeepseekV2Config):
        return config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return 2 * int(config.head_dim)  # type: ignore[attr-defined]
