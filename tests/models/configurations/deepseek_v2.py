"""Tiny models of DeepSeek-V2."""

from __future__ import annotations

from dataclasses import replace

from models.tiny_family import COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

GROUPS = {"n_routed_experts": 6, "topk_method": "group_limited_greedy", "n_group": 3}
TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "num_attention_heads": 3,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "num_attention_heads": (3, 1),
        "q_lora_rank": (None, 9),
        "first_k_dense_replace": (1, 0, 2, 3),
        "n_shared_experts": (2, 0, 1, 3),
        "routed_scaling_factor": (1.0, 2.5),
        "v_head_dim": (7, 16, 19),
        "rope_scaling": (
            None,
            replace(YARN, mscale=0.7),
            replace(YARN, mscale_all_dim=0.7, truncate=False),
            replace(YARN, mscale=0.7, mscale_all_dim=1.3),
            replace(YARN, attention_factor=0.8),
        ),
    },
    together=[
        [
            {"num_experts_per_tok": 2},
            {"num_experts_per_tok": 1},
            {"num_experts_per_tok": 5},
            {**GROUPS, "topk_group": 1},
            {**GROUPS, "topk_group": 2, "num_experts_per_tok": 3},
            {**GROUPS, "topk_group": 2, "topk_method": "greedy", "num_experts_per_tok": 3},
        ]
    ],
    untouched={
        "norm_topk_prob": "transformers ignores it (test_moe.py)",
        "seq_aux": "transformers ignores it (test_family_configs.py)",
        "aux_loss_alpha": "a coefficient in training",
    },
    may_be_zero=frozenset({"first_k_dense_replace", "n_shared_experts", "aux_loss_alpha"}),
    experts="n_routed_experts",
    wide={
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
    },
    refused={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 2},
)
