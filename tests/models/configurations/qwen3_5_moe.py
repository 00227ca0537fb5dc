"""Tiny models of Qwen3.5-MoE."""

from __future__ import annotations

from models.configurations.qwen3_next import (
    HYBRID_SIZES,
    HYBRID_TOGETHER,
    HYBRID_VALUES,
    HYBRID_WIDE,
    NAMES,
)
from models.tiny_family import TinyFamily

TINY = TinyFamily(
    sizes=HYBRID_SIZES,
    values=HYBRID_VALUES,
    together=HYBRID_TOGETHER,
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    names=NAMES,
    experts="num_experts",
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    wide=HYBRID_WIDE,
    saved_as="qwen3_5_moe_text",
    refused={"attn_output_gate": False, "norm_topk_prob": False, "decoder_sparse_step": 2},
)
