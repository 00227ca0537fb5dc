"""Tiny models of GLM-4.5."""

from __future__ import annotations

from models.configurations.deepseek_v3 import GROUPS, OF_DEPTHS, ONE_GROUP
from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "head_dim": 8,
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "attention_bias": (True, False),
        "use_qk_norm": (False, True),
        "first_k_dense_replace": (1, 0, 2, 3),
        "n_shared_experts": (2, 0, 1),
        "norm_topk_prob": (True, False),
        "routed_scaling_factor": (1.0, 2.5),
        "rope_scaling": (None, YARN),
    },
    together=[
        [
            {**ONE_GROUP, "num_experts_per_tok": 2},
            {**ONE_GROUP, "num_experts_per_tok": 5},
            {**GROUPS, "topk_group": 1, "num_experts_per_tok": 2},
            {**GROUPS, "topk_group": 2, "num_experts_per_tok": 3},
        ],
        [
            {"num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5},
            {"num_key_value_heads": 6, "head_dim": 8, "partial_rotary_factor": 0.25},
            {"num_key_value_heads": 1, "head_dim": 10, "partial_rotary_factor": 0.8},
            {"num_key_value_heads": 3, "head_dim": 6, "partial_rotary_factor": 1.0},
        ],
    ],
    untouched=OF_DEPTHS,
    may_be_zero=frozenset({"first_k_dense_replace", "n_shared_experts", *OF_DEPTHS}),
    experts="n_routed_experts",
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
    },
    refused={"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2},
)
