"""Tiny models of MiniMax-M2."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 11,
        "partial_rotary_factor": 0.4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "num_experts_per_tok": (2, 1, 3, 5),
        "partial_rotary_factor": (0.4, 0.6, 1.0),
        "rope_scaling": (None, YARN),
    },
    together=[
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 20},
            {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    names={".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    experts="num_local_experts",
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
    },
    refused={"scoring_func": "softmax", "use_qk_norm": False, "shared_intermediate_size": 8},
)
