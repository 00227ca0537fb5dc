"""Tiny models of GPT-OSS."""

from __future__ import annotations

from dataclasses import replace

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

FULL, SLIDING = "full_attention", "sliding_attention"
TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 11,
        "sliding_window": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.7,  # some values exceed it
    },
    values={
        **COMMON_VALUES,
        "sliding_window": (4, 1, 3, 20, 21, 100),
        "layer_types": (None, (FULL,) * 3, (FULL, SLIDING, SLIDING), (FULL, FULL, SLIDING)),
        "num_experts_per_tok": (2, 1, 3, 5),
        "attention_bias": (True, False),
        "swiglu_limit": (0.7, 0.01, 100.0),
        "swiglu_alpha": (1.702, 1.3, 0.5),
        "rope_scaling": (None, YARN, replace(YARN, truncate=False)),
    },
    together=[
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
            {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 2},
        ]
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    names={
        "mlp.gate.": "mlp.router.",
        "gate_up_bias": "gate_up_proj_bias",
        "down_bias": "down_proj_bias",
    },
    turned=("gate_up_proj", "down_proj"),
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    experts="num_local_experts",
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "intermediate_size": 128,
    },
    refused={"qkv_bias": False, "norm_topk_prob": False, "use_sliding_window": False},
)
