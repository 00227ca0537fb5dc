"""Tiny models of OLMoE."""

from __future__ import annotations

from models.tiny_family import COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 11,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "norm_topk_prob": (True, False),
        "num_experts_per_tok": (2, 1, 3, 5),
        "attention_bias": (False, True),
        "rope_scaling": (None, YARN),
    },
    together=[
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            {"num_attention_heads": 6, "num_key_value_heads": 1},
            {"num_attention_heads": 1, "num_key_value_heads": 1},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    experts="num_experts",
    wide={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
    },
    refused={"clip_qkv": 0.0, "use_qk_norm": False},
)
