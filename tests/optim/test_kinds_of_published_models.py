"""Models of `transformers`, made from tiny configurations offline, whose kinds of parameters are
recorded in `kinds.txt`."""

import torch
import transformers
from torch import nn

from lather.optim import describe_parameters

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "vocab_size": 96}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 8}
EXPERTS = {**TEXT, "num_key_value_heads": 2, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
GROUPS = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LAYERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
STATES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}

CONFIGURATIONS = {
    "GPT2LMHeadModel": {
        "vocab_size": 96,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
    },
    "GPTNeoXForCausalLM": TEXT,
    "LlamaForCausalLM": TEXT,
    "Qwen3MoeForCausalLM": {
        **EXPERTS,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    },
    "DeepseekV3ForCausalLM": {**EXPERTS, **LATENT, **GROUPS, "num_key_value_heads": 4},
    "GptOssForCausalLM": {**EXPERTS, "head_dim": 8, "num_local_experts": 4},
    "MambaForCausalLM": STATES,
    "Mamba2ForCausalLM": {**STATES, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "RwkvForCausalLM": {**STATES, "attention_hidden_size": 32},
    "ViTForImageClassification": IMAGES,
    "SwinModel": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "ConvNextModel": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "T5ForConditionalGeneration": {
        "vocab_size": 96,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    },
    "BertForMaskedLM": TEXT,
    "CLIPModel": {"text_config": TEXT, "vision_config": IMAGES, "projection_dim": 16},
    "WhisperForConditionalGeneration": {
        **LAYERS,
        "vocab_size": 96,
        "d_model": 32,
        "num_mel_bins": 8,
        "pad_token_id": 0,
    },
    "Wav2Vec2ForCTC": {
        **TEXT,
        "conv_dim": (16, 16),
        "conv_stride": (2, 2),
        "conv_kernel": (3, 3),
        "num_conv_pos_embedding_groups": 2,
    },
    "PerceiverModel": {
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
    },
}


def published(architecture: str) -> nn.Module:
    """Make a model on the meta device."""
    cls = getattr(transformers, architecture)
    with torch.device("meta"):
        model: nn.Module = cls(cls.config_class(**CONFIGURATIONS[architecture]))
    return model


def test_a_head_of_any_name_is_known_by_the_models_method() -> None:
    """GPT-NeoX's head was called `embed_out` for years: the name alone allows only a guess."""
    model = published("RwkvForCausalLM")
    model.embed_out = model.head
    del model.head
    model.get_output_embeddings = lambda: model.embed_out
    kinds = {each.name: each for each in describe_parameters(model)}
    assert (kinds["embed_out.weight"].kind, kinds["embed_out.weight"].is_guess) == ("rest", False)
    alone = {each.name: each for each in describe_parameters(list(model.named_parameters()))}
    assert (alone["embed_out.weight"].kind, alone["embed_out.weight"].is_guess) == ("rest", True)


def test_names_and_shapes_alone_find_almost_the_same() -> None:
    """Without modules, what differs is a guess, except for embeddings: their names say weight."""
    for architecture in CONFIGURATIONS:
        model = published(architecture)
        alone = {each.name: each for each in describe_parameters(list(model.named_parameters()))}
        for each in describe_parameters(model):
            named = alone[each.name]
            is_same = named.kind == each.kind or named.is_guess
            assert is_same or each.reason == "of nn.Embedding", each.name
