"""Tiny models of Qwen2-MoE."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "shared_expert_intermediate_size": 13,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    values={
        **COMMON_VALUES,
        "norm_topk_prob": (True, False),
        "num_experts_per_tok": (2, 1, 3, 5),
        "qkv_bias": (False, True),
        "rope_scaling": (None, YARN),
    },
    together=[
        [
            {"mlp_only_layers": ()},
            {"mlp_only_layers": (1,)},
            {"mlp_only_layers": (0, 2)},
            {"decoder_sparse_step": 2},
            {"decoder_sparse_step": 4},
        ],
        [
            {"use_sliding_window": False},
            {"use_sliding_window": True, "sliding_window": 4},
            {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1},
            {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0},
        ],
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
            {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    names={"shared_experts.": "shared_expert."},
    may_be_zero=frozenset({"router_aux_loss_coef", "max_window_layers", "sliding_window"}),
    experts="num_experts",
    mesh={"use_sliding_window": True, "sliding_window": 5},
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "intermediate_size": 256,
        "use_sliding_window": True,
        "sliding_window": 16,
    },
    refused={"layer_types": ["sliding_attention"] * 3, "shared_expert_intermediate_size": 0},
)
