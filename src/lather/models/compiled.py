"""Compiles the parts of a model that otherwise run as many small kernels: norms, and the preparation of queries, keys and values.

A norm in fp32, the rotary embedding and the split into heads each read and write whole tensors several times; compiled, forward and
backward are one pass each. Other parts are not compiled: linear layers, experts, router and loss have autograd functions that append weight
gradients to a queue, a side effect that a compiled backward cannot have; and attention itself is already one fused kernel (on CUDA, flex
attention is compiled where it is called).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lather.models.attention import GroupedQueryAttention, MultiHeadLatentAttention
from lather.models.layers import RMSNorm


def compile_parts(module: nn.Module, **options: Any) -> int:
    """Compile these parts of every layer inside `module` in place, each as one full graph; return how many there are.

    `options` are those of `torch.compile`: backend, mode and so on. Names and values of parameters do not change. Results are equal up to
    rounding. A second batch size causes one more compilation, which then serves all sizes. (The small norms of attention's latents are not
    compiled, because torch limits the number of widths for which it compiles one function.)
    """
    attentions = [layer for layer in module.modules() if isinstance(layer, GroupedQueryAttention | MultiHeadLatentAttention)]
    inside = {id(layer) for attention in attentions for layer in attention.modules()}
    norms = [layer for layer in module.modules() if isinstance(layer, RMSNorm) and id(layer) not in inside]
    for attention in attentions:
        if isinstance(attention, MultiHeadLatentAttention):  # backward recomputes these by themselves
            attention.keys_and_values = torch.compile(attention.keys_and_values, fullgraph=True, dynamic=None, **options)  # type: ignore[method-assign]
        attention.heads = torch.compile(attention.heads, fullgraph=True, dynamic=None, **options)  # type: ignore[assignment, method-assign]
    for norm in norms:
        norm.compile(fullgraph=True, dynamic=None, **options)
    return len(attentions) + len(norms)
