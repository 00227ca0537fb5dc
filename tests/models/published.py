"""Makes tiny models as Hugging Face's `transformers` saves them, one of each family; all sizes
differ, and every weight is drawn anew."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB_SIZE = 301
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "first_k_dense_replace": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 9,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        **ROPE,
    },
    "qwen3_moe": {
        "intermediate_size": 40,
        "moe_intermediate_size": 11,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_experts": 5,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        **ROPE,
    },
    "gpt_oss": {
        "intermediate_size": 11,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_local_experts": 5,
        "sliding_window": 5,
        "tie_word_embeddings": False,
        **ROPE,
    },
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = torch.randint(VOCAB_SIZE, (2, 13), generator=torch.Generator().manual_seed(1))


def make_model(family: str, **changes: Any) -> nn.Module:
    """Make a model whose weights all differ: norms about 1, the others about 0."""
    # transformers writes into what it is given
    fields = copy.deepcopy({**COMMON, **FAMILIES[family], **changes})
    config = transformers.AutoConfig.for_model(family, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5, generator=generator)
        else:
            nn.init.normal_(p, 0, 0.15, generator=generator)
    return model


def read_back(folder: Path) -> nn.Module:
    """Read a folder with `transformers`; nothing may be missing from it or left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **EAGER
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(TOKENS).logits
