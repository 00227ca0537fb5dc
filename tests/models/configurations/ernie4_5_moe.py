"""Tiny models of ERNIE 4.5 MoE."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

BIAS = "e_score_correction_bias"
TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "moe_num_experts": 5,
        "moe_num_shared_experts": 2,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "num_experts_per_tok": (2, 1, 3, 5),
        "moe_num_shared_experts": (2, 0, 1),
        "moe_norm_min": (1e-12, 0.4, 1e-3),
        "rope_scaling": (None, YARN),
    },
    together=[
        [
            {"moe_layer_start_index": 1, "moe_layer_interval": 1},
            {"moe_layer_start_index": 0, "moe_layer_interval": 1},
            {"moe_layer_start_index": 0, "moe_layer_interval": 2},
            {"moe_layer_start_index": 0, "moe_layer_end_index": 1},
            {"moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_layer_interval": 1},
            {"moe_layer_start_index": 3},
        ],
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    names={f".gate.{BIAS}": f".gate.moe_statics.{BIAS}"},
    may_be_zero=frozenset(
        {"moe_layer_start_index", "moe_num_shared_experts", "router_aux_loss_coef"}
    ),
    may_be_negative=frozenset({"moe_layer_end_index"}),
    experts="moe_num_experts",
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
    },
    refused={"use_bias": True, "moe_gate": "top2", "moe_use_aux_free": False},
)
