"""Tiny models of Qwen3-MoE."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={
        **COMMON_SIZES,
        **ATTENTION_SIZES,
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
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
            {"mlp_only_layers": ()},
            {"mlp_only_layers": (1,)},
            {"mlp_only_layers": (0, 2)},
            {"decoder_sparse_step": 2},
            {"decoder_sparse_step": 4},
        ],
        [
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4},
            {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    experts="num_experts",
    wide={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
    },
    refused={"use_sliding_window": True, "shared_expert_intermediate_size": 8},
)
