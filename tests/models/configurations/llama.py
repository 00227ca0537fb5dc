"""Tiny models of Llama."""

from __future__ import annotations

from lather.models.rotary import Llama3RopeConfig
from models.tiny_family import ATTENTION_SIZES, COMMON_SIZES, COMMON_VALUES, TinyFamily

TINY = TinyFamily(
    sizes={**COMMON_SIZES, **ATTENTION_SIZES, "intermediate_size": 40},
    values={
        **COMMON_VALUES,
        "num_key_value_heads": (2, 1, 6),
        "head_dim": (10, 4, 6),
        "attention_bias": (False, True),
        "rope_scaling": (
            None,
            Llama3RopeConfig(4.0, 16, 1.0, 4.0),
            Llama3RopeConfig(32.0, 64, 0.5, 8.0),
        ),
    },
    wide={"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256},
    refused={"mlp_bias": True, "sliding_window": 4, "n_shared_experts": 1},
)
