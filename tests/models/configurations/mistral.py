"""Tiny models of Mistral."""

from __future__ import annotations

from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, YARN, TinyFamily

TINY = TinyFamily(
    sizes={**COMMON_SIZES, **ATTENTION_SIZES, "intermediate_size": 40},
    values={
        **COMMON_VALUES,
        "num_key_value_heads": (2, 1, 6),
        "head_dim": (10, 4, 6),
        "sliding_window": (None, 2, 4, 20, 21, 100),
        "rope_scaling": (None, YARN),
    },
    wide={"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256},
    refused={"mlp_bias": True, "use_qk_norm": True},
)
