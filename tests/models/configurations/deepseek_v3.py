"""Tiny models of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from models.configurations import deepseek_v2
from models.tiny_family import COMMON_VALUES, YARN

OF_DEPTHS = {"num_nextn_predict_layers": "transformers leaves these blocks out (test_mtp.py)"}
ONE_GROUP = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1}
GROUPS = {"n_routed_experts": 12, "n_group": 3}
TINY = replace(
    deepseek_v2.TINY,
    values={
        **COMMON_VALUES,
        "num_attention_heads": (3, 1),
        "q_lora_rank": (None, 9),
        "first_k_dense_replace": (1, 0, 2, 3),
        "n_shared_experts": (2, 0, 1, 3),
        "routed_scaling_factor": (1.0, 2.5),
        "v_head_dim": (7, 16, 19),
        "norm_topk_prob": (True, False),
        "rope_interleave": (True, False),
        "rope_scaling": (
            None,
            replace(YARN, mscale=0.7),
            replace(YARN, mscale_all_dim=0.7, truncate=False),
            replace(YARN, mscale=0.7, mscale_all_dim=1.3),
            replace(YARN, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
            replace(YARN, attention_factor=0.8),
        ),
    },
    together=[
        [
            {**ONE_GROUP, "num_experts_per_tok": 2},
            {**ONE_GROUP, "num_experts_per_tok": 1},
            {**ONE_GROUP, "num_experts_per_tok": 5},
            {**GROUPS, "topk_group": 1, "num_experts_per_tok": 2},
            {**GROUPS, "topk_group": 2, "num_experts_per_tok": 3},
        ]
    ],
    untouched={
        "topk_method": "it has one value",
        "seq_aux": "transformers ignores it (test_family_configs.py)",
        "aux_loss_alpha": "a coefficient in training",
        **OF_DEPTHS,
    },
    may_be_zero=deepseek_v2.TINY.may_be_zero | {*OF_DEPTHS},
    refused={"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2},
)
