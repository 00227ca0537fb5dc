"""Tiny models of Qwen3-Next."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

FULL, LINEAR = "full_attention", "linear_attention"
HYBRID_SIZES = {
    **COMMON_SIZES,
    **ATTENTION_SIZES,
    "moe_intermediate_size": 11,
    "shared_expert_intermediate_size": 13,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-2,
}
HYBRID_VALUES = {
    **COMMON_VALUES,
    "rms_norm_eps": (1e-2, 1e-1),  # outputs of the rule may be near 0
    "num_experts_per_tok": (2, 1, 3, 5),
    "attention_bias": (False, True),
    "partial_rotary_factor": (0.25, 0.4, 1.0),
    "linear_conv_kernel_dim": (4, 1, 2, 30),
    "shared_expert_intermediate_size": (13, 2),
    "rope_scaling": (None, YARN),
}
HYBRID_TOGETHER = [
    [
        {"full_attention_interval": 2},
        {"full_attention_interval": 1},
        {"full_attention_interval": 3},
        {"layer_types": (FULL, LINEAR, LINEAR)},
        {"layer_types": (LINEAR, FULL, FULL)},
    ],
    [
        {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 7},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 5},
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 3},
    ],
]
HYBRID_WIDE = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
NAMES = {
    f"self_attn.{part}": f"linear_attn.{part}"
    for part in ("in_proj_", "conv1d.", "A_log", "dt_bias", "norm.", "out_proj.")
} | {".shared_experts.": ".shared_expert."}
TINY = TinyFamily(
    sizes={**HYBRID_SIZES, "intermediate_size": 40},
    values={**HYBRID_VALUES, "norm_topk_prob": (True, False)},
    together=[
        *HYBRID_TOGETHER,
        [
            {"mlp_only_layers": ()},
            {"mlp_only_layers": (1,)},
            {"mlp_only_layers": (0, 2)},
            {"decoder_sparse_step": 2},
        ],
    ],
    untouched={"router_aux_loss_coef": "a coefficient in training"},
    names=NAMES,
    experts="num_experts",
    may_be_zero=frozenset({"router_aux_loss_coef"}),
    wide={**HYBRID_WIDE, "intermediate_size": 256},
    refused={"attn_output_gate": False, "use_sliding_window": True, "n_shared_experts": 2},
)
