"""Reading and writing `config.json`: the published models, what is supported, and what is refused
by name."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.config.toml_file import load_config
from lather.errors import ConfigError
from lather.models.families import FAMILIES, ModelConfig, build_model
from lather.models.hf.config_json import config_from_hugging_face, config_to_hugging_face
from lather.models.rotary import YarnConfig
from models.tiny import tiny_family_config

FAMILY_NAMES = list(FAMILIES)

# --- The published models -------------------------------------------------------------------------

PUBLISHED_COUNTS = {
    "deepseek-v2-lite": 15_706_484_224,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}
"""Parameters of the models, published as 15.7, 30.5 and 20.9 billion."""
PRESETS = {
    name: load_config(Path(__file__).parents[2] / "configs" / f"{name}.toml").model
    for name in PUBLISHED_COUNTS
}

COMMON_FILE = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}
PUBLISHED_FILES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": COMMON_FILE
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "qwen3-30b-a3b": COMMON_FILE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": COMMON_FILE
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "transformers_version": "4.55.0.dev0",
        "vocab_size": 201088,
    },
}
FILES = {file["model_type"]: file for file in PUBLISHED_FILES.values()}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_published_file_says(name: str) -> None:
    assert config_from_hugging_face(PUBLISHED_FILES[name]) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters_and_costs_no_memory_to_look_at(
    name: str,
) -> None:
    model = build_model(PRESETS[name], torch.Generator(), torch.device("meta"))
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_COUNTS[name]


# --- config.json ----------------------------------------------------------------------------------

SCALING = YarnConfig(
    4.0, 64, 16.0, 2.0, mscale=0.7, mscale_all_dim=0.8, attention_factor=0.9, truncate=False
)
OTHER_VALUES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "q_lora_rank": 9,
        "first_k_dense_replace": 2,
        "n_group": 5,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "aux_loss_alpha": 0.5,
        "seq_aux": True,
    },
    "qwen3_moe": {
        "mlp_only_layers": (0, 2),
        "attention_bias": True,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.5,
    },
    "gpt_oss": {
        "layer_types": ("full_attention", "full_attention", "sliding_attention"),
        "attention_bias": False,
        "swiglu_alpha": 1.5,
        "router_aux_loss_coef": 0.5,
    },
}
COMMON_VALUES: dict[str, Any] = {
    "rope_theta": 50.0,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 99,
    "rope_scaling": SCALING,
}


@pytest.mark.parametrize("changed", [False, True], ids=["defaults", "all changed"])
@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_a_configuration_comes_back_from_its_file(model_type: str, changed: bool) -> None:
    config = tiny_family_config(
        model_type, **(OTHER_VALUES[model_type] | COMMON_VALUES if changed else {})
    )
    written = json.loads(json.dumps(config_to_hugging_face(config)))
    assert config_from_hugging_face(written) == config
    only_old = {key: value for key, value in written.items() if key != "rope_parameters"}
    only_new = {
        key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")
    }
    assert config_from_hugging_face(only_new) == config
    if changed or model_type != "gpt_oss":
        assert config_from_hugging_face(only_old) == config


@pytest.mark.parametrize("changed", [False, True], ids=["defaults", "all changed"])
@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_a_configuration_comes_back_from_transformers(model_type: str, changed: bool) -> None:
    """transformers reads our file and writes its own."""
    transformers = pytest.importorskip("transformers")
    config = tiny_family_config(
        model_type, **(OTHER_VALUES[model_type] | COMMON_VALUES if changed else {})
    )
    theirs = transformers.AutoConfig.for_model(**config_to_hugging_face(config))
    for written in (theirs.to_dict(), json.loads(theirs.to_json_string())):
        layer_types = (
            {"layer_types": tuple(written["layer_types"])} if model_type == "gpt_oss" else {}
        )
        assert config_from_hugging_face(written) == dataclasses.replace(config, **layer_types)


def test_layer_types_left_out_alternate_as_in_transformers() -> None:
    config = tiny_family_config("gpt_oss")
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    assert config.attention_types == kinds


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_a_family_is_found_by_its_configuration(model_type: str) -> None:
    config = tiny_family_config(model_type)
    assert isinstance(config, FAMILIES[config.model_type].config)
    assert set(typing.get_args(ModelConfig)) == {family.config for family in FAMILIES.values()}


NECESSARY = [
    *(
        (model_type, name)
        for model_type in FAMILY_NAMES
        for name in ("vocab_size", "hidden_size", "num_experts_per_tok", "rope_theta")
    ),
    ("deepseek_v2", "q_lora_rank"),
    ("deepseek_v2", "n_shared_experts"),
    ("deepseek_v2", "kv_lora_rank"),
    ("qwen3_moe", "num_experts"),
    ("qwen3_moe", "num_key_value_heads"),
    ("gpt_oss", "sliding_window"),
    ("gpt_oss", "rope_scaling"),
]


@pytest.mark.parametrize(("model_type", "name"), NECESSARY)
def test_a_missing_field_is_named(model_type: str, name: str) -> None:
    file = {key: value for key, value in FILES[model_type].items() if key != name}
    with pytest.raises(ConfigError, match=rf"^missing fields: {name}\b"):
        config_from_hugging_face(file)


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^missing fields: vocab_size, hidden_size, .*head_dim"):
        config_from_hugging_face(
            {
                "model_type": "gpt_oss",
                "rope_theta": 1.0,
                "rope_parameters": {"rope_type": "default"},
            }
        )


OPTIONAL: list[tuple[str, str, Any]] = [
    ("deepseek_v2", "topk_method", "greedy"),
    ("deepseek_v2", "n_group", 1),
    ("deepseek_v2", "first_k_dense_replace", 0),
    ("deepseek_v2", "seq_aux", True),
    ("qwen3_moe", "norm_topk_prob", False),
    ("qwen3_moe", "head_dim", 64),
    ("qwen3_moe", "mlp_only_layers", ()),
    ("gpt_oss", "swiglu_alpha", 1.702),
    ("gpt_oss", "layer_types", None),
    ("gpt_oss", "attention_bias", True),
]


@pytest.mark.parametrize("is_null", [False, True], ids=["left out", "null"])
@pytest.mark.parametrize(("model_type", "name", "value"), OPTIONAL)
def test_what_a_field_left_out_or_null_means(
    model_type: str, name: str, value: Any, is_null: bool
) -> None:
    file = {key: each for key, each in FILES[model_type].items() if key != name} | (
        {name: None} if is_null else {}
    )
    assert getattr(config_from_hugging_face(file), name) == value


UNSUPPORTED: list[tuple[str, str, Any, str]] = [
    *((model_type, "hidden_act", "gelu", "'silu'") for model_type in FAMILY_NAMES),
    *((model_type, "attention_dropout", 0.1, "0.0") for model_type in FAMILY_NAMES),
    *((model_type, "is_encoder_decoder", True, "false") for model_type in FAMILY_NAMES),
    *(
        (model_type, "architectures", ["LlamaForCausalLM"], "ForCausalLM")
        for model_type in FAMILY_NAMES
    ),
    *((model_type, "is_causal", False, "true") for model_type in FAMILY_NAMES),
    *((model_type, "final_logit_softcapping", 30.0, "no ") for model_type in FAMILY_NAMES),
    *((model_type, "embedding_multiplier", 12.0, "1 or null") for model_type in FAMILY_NAMES),
    *((model_type, "router_jitter_noise", 0.01, "no ") for model_type in FAMILY_NAMES),
    *(
        (model_type, "per_layer_config", {"1": {"num_experts": 2}}, "no ")
        for model_type in FAMILY_NAMES
    ),
    *((model_type, "scoring_func", "sigmoid", "'softmax'") for model_type in FAMILY_NAMES),
    ("deepseek_v2", "use_qk_norm", True, "no "),
    ("deepseek_v2", "rope_interleave", False, "true"),
    ("deepseek_v2", "layer_types", ["sliding_attention"] * 27, "'full_attention'"),
    ("deepseek_v2", "original_max_position_embeddings", 8192, "4096"),
    ("deepseek_v2", "attention_bias", True, "false"),
    ("deepseek_v2", "attention_bias", 0, "false"),
    ("deepseek_v2", "mlp_bias", True, "false"),
    ("deepseek_v2", "moe_layer_freq", 2, "1"),
    ("deepseek_v2", "moe_layer_freq", True, "1"),
    ("deepseek_v2", "num_key_value_heads", 4, "16"),
    ("deepseek_v2", "head_dim", 128, "64"),
    ("deepseek_v2", "qk_head_dim", 128, "192"),
    ("qwen3_moe", "use_sliding_window", True, "false"),
    ("qwen3_moe", "qkv_bias", True, "false"),
    ("qwen3_moe", "use_qk_norm", False, "true"),
    ("qwen3_moe", "topk_method", "noaux_tc", "'greedy'"),
    ("qwen3_moe", "n_group", 8, "1 or null"),
    ("qwen3_moe", "mlp_layer_types", ["dense"] * 48, "'sparse'"),
    ("qwen3_moe", "shared_expert_intermediate_size", 64, "no "),
    ("gpt_oss", "experts_per_token", 3, "4"),
    ("gpt_oss", "norm_topk_prob", False, "true"),
    ("gpt_oss", "qkv_bias", False, "true"),
]


@pytest.mark.parametrize(("model_type", "name", "value", "supported"), UNSUPPORTED)
def test_an_unsupported_field_or_value_is_named(
    model_type: str, name: str, value: Any, supported: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hugging_face(FILES[model_type] | {name: value})
    message = str(raised.value)
    shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    if len(shown) > 80:  # only the first entry that differs
        name, shown = f"{name}[0]", f"'{value[0]}'"
    assert message.startswith(f"{name} = {shown} is not supported")
    assert supported in message.partition(": ")[2]
    assert model_type in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_list_of_another_length_is_told_by_its_length() -> None:
    file = FILES["qwen3_moe"] | {"layer_types": ["full_attention"] * 4}
    with pytest.raises(ConfigError, match=r"^the length of layer_types = 4 is not .* must be 48;"):
        config_from_hugging_face(file)


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_unknown_fields_that_are_null_are_harmless(model_type: str) -> None:
    assert config_from_hugging_face(
        FILES[model_type] | {"surprise": None}
    ) == config_from_hugging_face(FILES[model_type])


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("hidden_size", "2048", "an integer"),
    ("hidden_size", 2048.0, "an integer"),
    ("hidden_size", True, "an integer"),
    ("rms_norm_eps", "1e-6", "a number"),
    ("rope_theta", "10000", "a number"),
    ("norm_topk_prob", 1, "true or false"),
    ("mlp_only_layers", 3, "a list"),
    ("mlp_only_layers", ["3"], "an integer"),
    ("rope_scaling", "yarn", "an object or null"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = .* is not valid: it must be {words}"):
        config_from_hugging_face(FILES["qwen3_moe"] | {name: value})


@pytest.mark.parametrize("model_type", [None, "llama", 3, ["gpt_oss"]], ids=str)
def test_an_unknown_family_is_refused(model_type: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^model_type = .* it must be one of deepseek_v2, qwen3_moe, gpt_oss$"
    ):
        config_from_hugging_face(FILES["gpt_oss"] | {"model_type": model_type})


ROPE: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling.rope_type = 'linear' is not supported",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
        "rope_scaling.rope_type = 'linear/yarn' is not supported",
    ),
    ({"rope_scaling": {"rope_type": "yarn"}}, "missing fields: rope_scaling.factor"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "short_factor": [1]}},
        "rope_scaling.short_factor = [1] is not supported",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": "2"}},
        "rope_scaling.factor = '2' is not valid",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 0.5}},
        "model.rope_scaling.factor = 0.5 is not valid",
    ),
    (
        {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
        "rope_scaling.factor = 2.0 is not supported",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor = 0.5 is not",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention = ",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "rope_theta = 1000000.0 and rope_parameters.rope_theta = 5.0",
    ),
    (
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
            "rope_parameters": {"rope_type": "default"},
        },
        'rope_scaling = {"factor": 2.0, "original_max_position_embeddings": 40960',
    ),
    ({"num_local_experts": 64}, "num_local_experts = 64 contradicts num_experts = 128"),
]


@pytest.mark.parametrize(("changes", "words"), ROPE, ids=[words for _, words in ROPE])
def test_rotary_embedding_that_is_not_supported_or_contradicts_itself_is_named(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hugging_face(FILES["qwen3_moe"] | changes)
    assert str(raised.value).startswith(words)


def test_yarn_without_an_original_length_takes_the_whole_one_as_transformers_does() -> None:
    config = config_from_hugging_face(
        FILES["qwen3_moe"] | {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": None}}
    )
    assert config.rope_scaling == YarnConfig(4.0, 40960)


def test_quantized_weights_are_read_in_the_published_form_only() -> None:
    for model_type, method in [
        ("gpt_oss", "gptq"),
        ("qwen3_moe", "mxfp4"),
        ("gpt_oss", None),
        ("qwen3_moe", None),
    ]:
        for name in ("quantization_config", "compression_config", "quantization"):
            shown = f"'{method}'" if method else "null"
            words = (
                rf"^{name}.quant_method = {shown} is not supported "
                rf"for {model_type}.*weights are in bf16"
            )
            with pytest.raises(ConfigError, match=words):
                config_from_hugging_face(FILES[model_type] | {name: {"quant_method": method}})
    assert "quantization_config" not in config_to_hugging_face(PRESETS["gpt-oss-20b"])


def test_quantized_weights_of_mlx_are_shown_as_the_file_has_them() -> None:
    file = FILES["qwen3_moe"] | {"quantization": {"group_size": 64, "bits": 4}}
    words = r'^quantization = \{"group_size": 64, "bits": 4\} is not supported'
    with pytest.raises(ConfigError, match=words):
        config_from_hugging_face(file)
