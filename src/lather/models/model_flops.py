"""The model flops of a token, forward and backward: the useful work, of whose rate MFU (model flops
utilization) is the share of a device's peak.

    6 * (parameters that multiply a token) + 6 * heads * (query width + value width) * V

A multiplication and an addition are two flops; backward costs twice the forward, and as much as the
forward for parameters that are not trained. The parameters that multiply a token are the matrices
without the embedding and with the head, which each depth of multi-token prediction uses again; of
the routed experts K of E count. V is the mean number of tokens that a token attends to, added up
over the layers: S / 2 in a whole causal sequence, less in a sliding window, 0 in linear attention.
Recomputation, the optimizer and the router's bookkeeping do not count.

Letters: S tokens of a sequence, E experts, K experts per token.
"""

from __future__ import annotations

from torch import nn

from lather.models.experts import Experts
from lather.models.families import ModelConfig
from lather.models.family import FULL_ATTENTION, SLIDING_ATTENTION


def flops_per_token(
    layers: nn.Module, config: ModelConfig, length: int, num_layers: int | None = None
) -> float:
    """Compute the model flops of a token of a whole model, or of the first `num_layers` of its
    blocks, in a sequence of `length` tokens."""
    kinds = config.attention_types[:num_layers]
    depths = 0 if num_layers else config.num_nextn_predict_layers
    kinds += (FULL_ATTENTION,) * depths
    seen = sum(_tokens_seen(kind, config, length) for kind in kinds)
    again = 6 * depths * _size(config, "vocab_size") * _size(config, "hidden_size")
    share = config.num_experts_per_tok / max(1, config.num_routed_experts)
    attention = 6 * _size(config, "num_attention_heads") * _widths(config) * seen
    return _flops_of_weights(layers, share) + again + attention


def _flops_of_weights(module: nn.Module, share: float, of_experts: float = 1.0) -> float:
    """Compute the flops of a token with the matrices of a module and of those in it; of experts,
    and of their adapters, a `share` counts."""
    if isinstance(module, nn.Embedding):
        return 0.0
    if isinstance(module, Experts):
        of_experts = share
    matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    flops = of_experts * sum((6 if p.requires_grad else 4) * p.numel() for p in matrices)
    return flops + sum(_flops_of_weights(part, share, of_experts) for part in module.children())


def _tokens_seen(kind: str, config: ModelConfig, length: int) -> float:
    """Return the mean number of tokens that a token attends to in a layer."""
    if kind == FULL_ATTENTION:
        return length / 2
    if kind != SLIDING_ATTENTION:
        return 0.0
    window = min(length, _size(config, "sliding_window"))
    return window - window**2 / (2 * length)


def _widths(config: ModelConfig) -> int:
    """Return the width of a head's query and of its value together."""
    of_latents = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return sum(_size(config, name) for name in of_latents) or 2 * _size(config, "head_dim")


def _size(config: ModelConfig, name: str) -> int:
    """Return a size of the model; 0 if its family has none by this name."""
    return int(getattr(config, name, 0))
