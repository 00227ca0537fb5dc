"""Sizes of a model that trains in milliseconds, as the `[model]` section of a configuration. Ranks
import it without pytest."""

from typing import Any

VOCAB_SIZE = 264

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "max_position_embeddings": 64,
}
