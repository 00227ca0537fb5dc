"""Tiny models of Mixtral."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 11,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "num_experts_per_tok": (2, 1, 3, 5),
        "sliding_window": (None, 4, 2),
        "rope_scaling": (None, YARN),
    },
    together=[
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
            {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    experts="num_local_experts",
    mesh={"sliding_window": 5},
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "sliding_window": 16,
    },
    refused={"router_jitter_noise": 0.1, "norm_topk_prob": False},
)
