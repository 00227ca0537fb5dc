"""Fused kernels that attend to a piece of the keys: torch's for a CPU, and cuDNN's.

Besides the output, a kernel returns the log-sum-exp of each query's logits. Its backward gets the
output and log-sum-exps of all keys, and returns the part of the gradients that belongs to the keys
of the piece (`lather.models.attention_pieces`).

The CPU's kernel takes masks and equal widths. cuDNN's takes no mask here, and values of another
width than the queries'.

Letters: B sequences, Q queries of a block, K keys of a piece, H heads, G key-value heads, N width
of a query and key, U of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.shapes import Float
from lather.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
)

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True)
class PieceOptions:
    """The options of a call."""

    causal: bool
    """Query number i attends to the keys up to number i."""
    mask: Float[Tensor, "#b 1 q k"] | None
    """Numbers that are added to the logits."""
    scale: float


@dataclass(frozen=True)
class PieceKernels:
    """The two kernels of a device."""

    attend: Callable[[Tensor, Tensor, Tensor, PieceOptions], tuple[Tensor, Tensor]]
    """Gets queries, keys and values, and returns outputs (B, H, Q, U) and log-sum-exps (B, H,
    Q)."""
    differentiate: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, PieceOptions], Gradients
    ]
    """Gets the gradient of the output, queries, keys and values, and the output and log-sum-exps,
    contiguous, of all keys."""


def _attend_on_cpu(
    q_BHQN: Tensor, k_BGKN: Tensor, v_BGKN: Tensor, options: PieceOptions
) -> tuple[Tensor, Tensor]:
    y_BHQN, lse_BHQ = cpu_attention(
        q_BHQN,
        k_BGKN,
        v_BGKN,
        0.0,
        options.causal,
        attn_mask=options.mask,
        scale=options.scale,
    )
    return y_BHQN, lse_BHQ


def _differentiate_on_cpu(
    grad_BHQN: Tensor,
    q_BHQN: Tensor,
    k_BGKN: Tensor,
    v_BGKN: Tensor,
    y_BHQN: Tensor,
    lse_BHQ: Tensor,
    options: PieceOptions,
) -> Gradients:
    dq_BHQN, dk_BGKN, dv_BGKN = cpu_attention_backward(
        grad_BHQN,
        q_BHQN,
        k_BGKN,
        v_BGKN,
        y_BHQN,
        lse_BHQ,
        0.0,
        options.causal,
        attn_mask=options.mask,
        scale=options.scale,
    )
    return dq_BHQN, dk_BGKN, dv_BGKN


def _attend_by_cudnn(
    q_BHQN: Tensor, k_BGKN: Tensor, v_BGKU: Tensor, options: PieceOptions
) -> tuple[Tensor, Tensor]:
    assert options.mask is None
    y_BHQU, lse_BHQ1, *_ = cudnn_attention(
        q_BHQN, k_BGKN, v_BGKU, None, True, 0.0, options.causal, scale=options.scale
    )
    return y_BHQU, lse_BHQ1.flatten(2)


def _differentiate_by_cudnn(
    grad_BHQU: Tensor,
    q_BHQN: Tensor,
    k_BGKN: Tensor,
    v_BGKU: Tensor,
    y_BHQU: Tensor,
    lse_BHQ: Tensor,
    options: PieceOptions,
) -> Gradients:
    assert options.mask is None
    seed = q_BHQN.new_empty((), dtype=torch.int64)  # of a dropout that there is not
    dq_BHQN, dk_BGKN, dv_BGKU = cudnn_attention_backward(
        grad_BHQU,
        q_BHQN,
        k_BGKN,
        v_BGKU,
        y_BHQU,
        lse_BHQ.unsqueeze(-1),
        seed,
        seed,
        None,
        None,
        None,
        q_BHQN.shape[2],
        k_BGKN.shape[2],
        0.0,
        options.causal,
        scale=options.scale,
    )
    return dq_BHQN, dk_BGKN, dv_BGKU


ON_CPU = PieceKernels(_attend_on_cpu, _differentiate_on_cpu)
BY_CUDNN = PieceKernels(_attend_by_cudnn, _differentiate_by_cudnn)
