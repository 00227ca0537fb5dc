"""Compiling the parts of a model that are many small kernels otherwise: norms, and what attention does to queries, keys and values.

A norm in fp32, a turn by the rotary angles or the parting into heads each read and write whole tensors several times; compiled, each is one
pass, and so is its backward. Left as they are: linear layers, experts, router and loss, whose own autograd functions hand weight gradients
to a queue (a side effect that no compiled backward has), and attention's products, which are one fused kernel already (flex attention
compiles itself on CUDA).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lather.models.attention import GroupedQueryAttention, MultiHeadLatentAttention
from lather.models.layers import RMSNorm


def compile_parts(module: nn.Module, **options: Any) -> int:
    """Compile those parts of every layer inside `module`, in place and each as one whole graph; how many there are.

    `options` are `torch.compile`'s: backend, mode and so on. Names and values of parameters stay as they are. What is compiled gives the
    same numbers within rounding. Batches of another size are compiled for once more, then for all sizes. (The small norms of attention's
    latents are left alone: torch refuses to compile one formula for more than a few widths.)
    """
    attentions = [layer for layer in module.modules() if isinstance(layer, GroupedQueryAttention | MultiHeadLatentAttention)]
    inside = {id(layer) for attention in attentions for layer in attention.modules()}
    norms = [layer for layer in module.modules() if isinstance(layer, RMSNorm) and id(layer) not in inside]
    for attention in attentions:
        if isinstance(attention, MultiHeadLatentAttention):  # backward makes these again by themselves
            attention.keys_and_values = torch.compile(attention.keys_and_values, fullgraph=True, dynamic=None, **options)  # type: ignore[method-assign]
        attention.heads = torch.compile(attention.heads, fullgraph=True, dynamic=None, **options)  # type: ignore[assignment, method-assign]
    for norm in norms:
        norm.compile(fullgraph=True, dynamic=None, **options)
    return len(attentions) + len(norms)
