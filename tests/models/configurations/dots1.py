"""Tiny models of dots.llm1."""

from __future__ import annotations

from models.configurations.deepseek_v3 import GROUPS, ONE_GROUP
from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "attention_bias": (False, True),
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
            {"sliding_window": None, "max_window_layers": 0},
            {"sliding_window": 4, "max_window_layers": 2},
            {"sliding_window": 7, "max_window_layers": 0},
            {"sliding_window": 4, "max_window_layers": 62},
        ],
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
        ],
    ],
    may_be_zero=frozenset({"first_k_dense_replace", "n_shared_experts", "max_window_layers"}),
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
