"""Reading and writing `config.json`: published files, what is supported, and what is refused by
name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.config.toml_file import load_config
from lather.errors import ConfigError
from lather.models.families import FAMILIES, build_model, family_of
from lather.models.hf.config_json import (
    config_from_hugging_face,
    config_to_hugging_face,
    unread_fields,
)
from lather.models.hf.known_fields import NEUTRAL, NO_INFLUENCE
from lather.models.rotary import Llama3RopeConfig, YarnConfig
from models.tiny import tiny_family_config

HERE = Path(__file__)
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    HERE.with_name("published_configs.json").read_text("utf-8")
)
"""Files as the authors of the models have published them."""
PRESETS = {
    "deepseek-v2-lite": ("deepseek-v2-lite", 15_706_484_224),
    "deepseek-v3": ("DeepSeek-V3", 671_026_404_352),
    "glm-4.5-air": ("GLM-4.5-Air", 106_852_245_504),
    "gpt-oss-20b": ("gpt-oss-20b", 20_914_757_184),
    "kimi-k2": ("Kimi-K2-Instruct", 1_026_408_209_408),
    "llama-3.2-1b": ("Llama-3.2-1B", 1_235_814_400),
    "mixtral-8x7b": ("Mixtral-8x7B-v0.1", 46_702_792_704),
    "moonlight-16b-a3b": ("Moonlight-16B-A3B", 15_960_108_544),
    "olmoe-1b-7b": ("OLMoE-1B-7B-0924", 6_919_161_856),
    "qwen3-0.6b": ("Qwen3-0.6B", 596_049_920),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 30_532_122_624),
    "qwen3-next-80b-a3b": ("Qwen3-Next-80B-A3B-Instruct", 79_674_391_296),
    "qwen3.5-35b-a3b": ("Qwen3.5-35B-A3B", 34_660_610_688),
}
"""The published file of each preset, and its number of parameters, which transformers counts, too:
the authors' 15.7, 671, 106, 20.9, 1,026, 1.24, 46.7, 16, 6.9, 0.6, 30.5, 80 and 35 billion."""
FILES = {
    file["model_type"]: file for file in reversed(PUBLISHED.values()) if "text_config" not in file
}
"""The first published file of a family, except of those that nest the fields of the text model."""
OF_EACH_FAMILY = pytest.mark.parametrize("model_type", FILES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_published_file_says_and_costs_no_memory_to_look_at(name: str) -> None:
    published, num_parameters = PRESETS[name]
    preset = load_config(HERE.parents[2] / "configs" / f"{name}.toml").model
    file = PUBLISHED[published]
    if "num_nextn_predict_layers" in file:  # presets leave multi-token prediction out
        file = file | {"num_nextn_predict_layers": 0}
    assert config_from_hugging_face(file) == preset
    model = build_model(preset, torch.Generator(), torch.device("meta"))
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_whole(name: str) -> None:
    config = config_from_hugging_face(PUBLISHED[name])
    assert unread_fields(PUBLISHED[name], family_of(config)) == []
    assert config_from_hugging_face(config_to_hugging_face(config)) == config
    if name == "Qwen3-Coder-30B-A3B-Instruct":  # its further fields say what is built anyway
        changes = {"intermediate_size": 5472, "max_position_embeddings": 262144, "rope_theta": 1e7}
        plain = config_from_hugging_face(PUBLISHED["qwen3-30b-a3b"])
        assert config == dataclasses.replace(plain, **changes, router_aux_loss_coef=0.0)


# --- There and back -------------------------------------------------------------------------------

OTHER_VALUES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "q_lora_rank": 9,
        "first_k_dense_replace": 2,
        **{"n_group": 5, "topk_group": 3, "topk_method": "group_limited_greedy"},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        **{"aux_loss_alpha": 0.5, "seq_aux": True},
    },
    "qwen3_moe": {
        **{"mlp_only_layers": (0, 2), "attention_bias": True},
        **{"norm_topk_prob": False, "router_aux_loss_coef": 0.5},
    },
    "gpt_oss": {
        "layer_types": ("full_attention", "full_attention", "sliding_attention"),
        **{"attention_bias": False, "swiglu_alpha": 1.5, "router_aux_loss_coef": 0.5},
    },
    "llama": {"attention_bias": True, "rope_scaling": Llama3RopeConfig(4.0, 64, 0.5, 2.0)},
    "mistral": {"sliding_window": 3},
}
YARN = {"mscale": 0.7, "mscale_all_dim": 0.8, "attention_factor": 0.9, "truncate": False}
COMMON_VALUES: dict[str, Any] = {
    **{"rope_theta": 50.0, "rope_scaling": YarnConfig(4.0, 64, 16.0, 2.0, **YARN)},
    **{"rms_norm_eps": 1e-3, "tie_word_embeddings": True, "max_position_embeddings": 99},
}


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [(name, False) for name in FAMILIES] + [(name, True) for name in OTHER_VALUES],
)
def test_a_configuration_comes_back_from_its_file(model_type: str, changed: bool) -> None:
    """Each style of rotary settings is sufficient; transformers reads our file and writes its
    own."""
    changes = COMMON_VALUES | OTHER_VALUES.get(model_type, {}) if changed else {}
    config = tiny_family_config(model_type, **changes)
    written = json.loads(json.dumps(config_to_hugging_face(config)))
    assert config_from_hugging_face(written) == config
    old_style = {key: value for key, value in written.items() if key != "rope_parameters"}
    new_style = {
        k: value for k, value in written.items() if k not in ("rope_theta", "rope_scaling")
    }
    assert config_from_hugging_face(new_style) == config
    if changed or model_type != "gpt_oss":
        assert config_from_hugging_face(old_style) == config
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        return
    theirs = transformers.AutoConfig.for_model(**config_to_hugging_face(config))
    for theirs_written in (theirs.to_dict(), json.loads(theirs.to_json_string())):
        assert config_from_hugging_face(theirs_written) == config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_found_by_its_configuration(model_type: str) -> None:
    config = tiny_family_config(model_type)
    assert family_of(config) is FAMILIES[model_type]
    assert isinstance(config, FAMILIES[model_type].config)


# --- Fields that are ignored, families that are named ---------------------------------------------


def test_a_field_is_ignored_if_told_unless_the_model_is_built_from_it() -> None:
    file = FILES["qwen3_moe"]
    expected = config_from_hugging_face(file)
    scaled = {"rope_scaling": {"rope_type": "default", "of_no_rope": 2}}
    more = file | {"final_logit_softcapping": 30.0, "use_sliding_window": True} | scaled
    ignored = ["final_logit_softcapping", "use_sliding_window", "rope_scaling.of_no_rope"]
    assert config_from_hugging_face(more, ignore_fields=ignored) == expected
    assert more["final_logit_softcapping"] == 30.0
    for left, words in [
        (ignored[1:], "^final_logit_softcapping = 30.0 is not supported"),
        (ignored[:2], "^rope_scaling.of_no_rope = 2 is not supported"),
        ([*ignored, "surprise"], "^ignore_fields has 'surprise', but the file has no such field"),
        ([*ignored, "head_dim.x"], "^ignore_fields has 'head_dim.x', but the file has no such"),
        ([*ignored, "head_dim"], "^ignore_fields has 'head_dim', from which a qwen3_moe model is"),
        ([*ignored, "rope_scaling"], "^ignore_fields has 'rope_scaling', from which a"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config_from_hugging_face(more, ignore_fields=left)


@pytest.mark.parametrize(
    ("model_type", "outer", "inner"),
    [
        ("llama", "rope_parameters", "rope_theta"),
        ("llama", "rope_parameters", "rope_type"),
        ("llama", "rope_scaling", "low_freq_factor"),
        ("deepseek_v3", "rope_scaling", "mscale"),
        ("deepseek_v3", "rope_scaling", "type"),
        ("glm4_moe", "rope_parameters", "partial_rotary_factor"),
    ],
)
def test_a_rotary_setting_in_another_field_is_never_ignored(
    model_type: str, outer: str, inner: str
) -> None:
    file, name = FILES[model_type] | {outer: {inner: 7.0, "surprise": 1}}, f"{outer}.{inner}"
    words = f"^ignore_fields has '{name}', from which a {model_type} model is built: correct it"
    with pytest.raises(ConfigError, match=words):
        config_from_hugging_face(file, ignore_fields=[f"{outer}.surprise", name])


def test_rotary_dim_is_read_only_for_the_family_that_is_published_with_it() -> None:
    plain = config_from_hugging_face(FILES["glm4_moe"])
    assert config_from_hugging_face(FILES["glm4_moe"] | {"rotary_dim": 4}) == plain
    assert unread_fields({"rotary_dim": 4}, FAMILIES["glm4_moe"]) == ["rotary_dim"]
    file = FILES["minimax_m2"] | {"head_dim": 128, "rotary_dim": 32}
    assert config_from_hugging_face(file).partial_rotary_factor == 0.25
    with pytest.raises(ConfigError, match="'rotary_dim', from which a minimax_m2 model is built"):
        config_from_hugging_face(file, ignore_fields=["rotary_dim"])


def test_a_file_is_read_as_the_family_that_is_named() -> None:
    """It has the published name, in the file, and its own in the configuration."""
    named = "lather.models.families.qwen3_moe:FAMILY"
    config = config_from_hugging_face(FILES["qwen3_moe"], model_type=named)
    assert config == dataclasses.replace(
        config_from_hugging_face(FILES["qwen3_moe"]), model_type=named
    )
    assert config_to_hugging_face(config)["model_type"] == "qwen3_moe"
    words = f"^model_type = 'gpt_oss' is another family than {named}, which is published as"
    with pytest.raises(ConfigError, match=words):
        config_from_hugging_face(FILES["gpt_oss"], model_type=named)


# --- Fields that are left out or harmless ---------------------------------------------------------

OPTIONAL: list[tuple[str, str, Any]] = [
    ("deepseek_v2", "topk_method", "greedy"),
    ("deepseek_v2", "n_group", 1),
    ("deepseek_v2", "first_k_dense_replace", 0),
    ("deepseek_v2", "seq_aux", True),
    ("deepseek_v3", "n_group", 8),
    ("deepseek_v3", "norm_topk_prob", True),
    ("deepseek_v3", "rope_interleave", True),
    ("deepseek_v3", "routed_scaling_factor", 2.5),
    ("qwen3_moe", "norm_topk_prob", False),
    ("qwen3_moe", "head_dim", 64),
    ("qwen3_moe", "mlp_only_layers", ()),
    ("gpt_oss", "swiglu_alpha", 1.702),
    ("gpt_oss", "layer_types", None),
    ("gpt_oss", "attention_bias", True),
    ("llama", "num_key_value_heads", 32),
    ("llama", "head_dim", 64),
    ("qwen3", "head_dim", 128),
]


@pytest.mark.parametrize(("model_type", "name", "value"), OPTIONAL)
def test_what_a_field_left_out_or_null_means(model_type: str, name: str, value: Any) -> None:
    left_out = {key: each for key, each in FILES[model_type].items() if key != name}
    for file in (left_out, left_out | {name: None}):
        assert getattr(config_from_hugging_face(file), name) == value


HARMLESS: dict[str, dict[str, Any]] = {
    "unsloth": {"unsloth_fixed": True, "unsloth_version": "2025.9.4", "model_name": "unsloth/X"},
    "transformers 4": {"_attn_implementation_autoset": True, "_name_or_path": "x"},
    "transformers 5": {"dtype": "bfloat16", "id2label": {"0": "LABEL_0"}, "label2id": {}},
    "generation": {"temperature": 0.6, "do_sample": True, "max_length": 20, "bad_words_ids": None},
    "base class": {"torchscript": False, "pruned_heads": {}, "tie_encoder_decoder": False},
    "neutral": {"router_jitter_noise": 0.0, "rotary_pct": 1.0, "num_expert_group": None},
    "unknown, but null": {"surprise": None, "final_logit_softcapping": None},
}
AGREEING: list[tuple[str, str, Any]] = [
    *((family, name, value) for family in FILES for name, value in HARMLESS.items()),
    ("qwen3_moe", "sliding_window", 4096),  # without influence, since use_sliding_window is false
    ("qwen3_moe", "layer_types", ["full_attention"] * 48),
    ("qwen3_moe", "mlp_layer_types", ["sparse"] * 48),
    ("qwen3_moe", "scoring_func", "softmax"),
    ("qwen3_moe", "hidden_act", "swish"),
    ("deepseek_v2", "mlp_layer_types", ["dense", *["sparse"] * 26]),
    ("deepseek_v2", "head_dim", 64),
    ("deepseek_v2", "qk_head_dim", 192),
    ("deepseek_v2", "rope_interleave", True),
    ("deepseek_v2", "original_max_position_embeddings", 4096),
    ("gpt_oss", "norm_topk_prob", True),
    ("gpt_oss", "swiglu_alpha", 1.702),
    ("gpt_oss", "quantization_config", None),
]
"""Fields of tools by the name of the tool, and single fields that say what is built."""


@pytest.mark.parametrize(("model_type", "name", "value"), AGREEING)
def test_fields_that_change_nothing_are_accepted(model_type: str, name: str, value: Any) -> None:
    fields = {field.name for field in dataclasses.fields(FAMILIES[model_type].config)}
    further = HARMLESS.get(name, {name: value})
    file = FILES[model_type] | {key: each for key, each in further.items() if key not in fields}
    assert config_from_hugging_face(file) == config_from_hugging_face(FILES[model_type])
    assert unread_fields(file, FAMILIES[model_type]) == []


@OF_EACH_FAMILY
def test_a_field_of_other_models_is_refused_unless_it_is_off(model_type: str) -> None:
    assert not NO_INFLUENCE & NEUTRAL.keys()
    file, family = FILES[model_type], FAMILIES[model_type]
    ours = {field.name for field in dataclasses.fields(family.config)} | family.ignored
    others = sorted(NEUTRAL.keys() - ours - family.written.keys() - family.aliases.keys())
    assert len(others) > 80
    for name in others:
        assert config_from_hugging_face(file | {name: None}) == config_from_hugging_face(file)
        with pytest.raises(
            ConfigError, match=rf"^{name} = 7 is not supported for {model_type}: it must be "
        ):
            config_from_hugging_face(file | {name: 7})


# --- Errors ---------------------------------------------------------------------------------------

NECESSARY = {
    "deepseek_v2": ("q_lora_rank", "n_shared_experts", "kv_lora_rank", "num_experts_per_tok"),
    "qwen3_moe": ("num_experts", "num_key_value_heads", "num_experts_per_tok", "rope_theta"),
    "gpt_oss": ("sliding_window", "rope_scaling", "num_experts_per_tok", "rope_theta"),
    "mistral": ("sliding_window", "num_key_value_heads"),
}


@OF_EACH_FAMILY
def test_a_missing_field_is_named(model_type: str) -> None:
    common = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    for name in (*common, *NECESSARY.get(model_type, ())):
        file = {key: value for key, value in FILES[model_type].items() if key != name}
        with pytest.raises(ConfigError, match=rf"^missing fields: {name}\b"):
            config_from_hugging_face(file)


YARN_OF_4 = {"rope_type": "yarn", "factor": 4.0}
ERRORS: list[tuple[str, dict[str, Any], str]] = [
    *(("gpt_oss", {"model_type": name}, r"^model_type = .* it must be one of deepseek_v2, ")
      for name in (None, "gpt2", 3, ["gpt_oss"])),
    ("qwen3_moe", {"hidden_size": "2048"}, "^hidden_size = '2048' is not valid: .* an integer"),
    ("qwen3_moe", {"hidden_size": 2048.0}, "^hidden_size = 2048.0 .* an integer"),
    ("qwen3_moe", {"hidden_size": True}, "^hidden_size = true .* an integer"),
    ("qwen3_moe", {"hidden_size": 10**30}, r"^hidden_size = 1000.* must be below 1e\+08"),
    ("qwen3_moe", {"rope_theta": 10**400}, r"^rope_theta = 1000.* must be below 1e\+300"),
    ("qwen3_moe", {"rms_norm_eps": "1e-6"}, "^rms_norm_eps = '1e-6' .* a number"),
    ("qwen3_moe", {"rope_theta": "10000"}, "^rope_theta = '10000' .* a number"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "^norm_topk_prob = 1 .* true or false"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "^mlp_only_layers = 3 .* a list"),
    ("qwen3_moe", {"mlp_only_layers": ["3"]}, "^mlp_only_layers = '3' .* an integer"),
    ("qwen3_moe", {"rope_scaling": "yarn"}, "^rope_scaling = 'yarn' .* an object or null"),
    ("qwen3_moe", {"layer_types": ["full_attention"] * 4},
     "^the length of layer_types = 4 is not .* must be 48;"),
    ("qwen3_moe", {"num_local_experts": 64}, "^num_local_experts = 64 contradicts num_experts"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     "^rope_scaling.rope_type = 'linear' is not supported"),
    ("qwen3_moe", {"rope_scaling": YARN_OF_4 | {"type": "linear"}},
     "^rope_scaling.rope_type = 'linear/yarn' is not supported"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "yarn"}}, "^missing fields: rope_scaling.factor"),
    ("qwen3_moe", {"rope_scaling": YARN_OF_4 | {"short_factor": [1]}},
     r"^rope_scaling.short_factor = \[1\] is not supported"),
    ("qwen3_moe", {"rope_scaling": YARN_OF_4 | {"factor": "2"}}, "^rope_scaling.factor = '2' is"),
    ("qwen3_moe", {"rope_scaling": YARN_OF_4 | {"factor": 0.5}},
     "^model.rope_scaling.factor = 0.5 is not valid"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
     "^rope_scaling.factor = 2.0 is not supported"),
    ("qwen3_moe", {"rope_scaling": YARN_OF_4 | {"partial_rotary_factor": 0.5}},
     "^rope_scaling.partial_rotary_factor = 0.5 is not"),
    ("qwen3_moe", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     "^rope_parameters.full_attention = "),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
     "^rope_theta = 1000000.0 and rope_parameters.rope_theta = 5.0 contradict"),
    ("qwen3_moe", {"rope_scaling": YARN_OF_4, "rope_parameters": {"rope_type": "default"}},
     r'^rope_scaling = \{"factor": 4.0, "original_max_position_embeddings": 40960'),
    ("qwen3_moe", {"quantization": {"group_size": 64, "bits": 4}},
     r'^quantization = \{"group_size": 64, "bits": 4\} is not supported'),
    ("deepseek_v3", {"quantization_config": [128, 128]},
     r"^quantization_config = \[128, 128\] is not supported .* must be 'fp8' or left out"),
    *((model_type, {name: {"quant_method": method}},
       rf"^{name}.quant_method = {shown} is not supported for {model_type}.*weights are in bf16")
      for name in ("quantization_config", "compression_config")
      for model_type, method, shown in [("gpt_oss", "gptq", "'gptq'"),
                                        ("qwen3_moe", "mxfp4", "'mxfp4'"),
                                        ("gpt_oss", None, "null")]),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "words"), ERRORS, ids=str)
def test_an_error_names_the_field_its_value_and_the_remedy(
    model_type: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hugging_face(FILES[model_type] | changes)


UNSUPPORTED: list[tuple[str, str, Any, str]] = [
    *((family, name, value, supported)
      for family in FILES
      for name, value, supported in [
          ("hidden_act", "gelu", "'silu'"), ("attention_dropout", 0.1, "0.0"),
          ("is_encoder_decoder", True, "false"), ("is_causal", False, "true"),
          ("architectures", ["LlamaModel"], "ForCausalLM"),
          ("final_logit_softcapping", 30.0, "no "), ("embedding_multiplier", 12.0, "1 or null"),
          ("router_jitter_noise", 0.01, "no "), ("scoring_func", "tanh", "'s"),
          ("per_layer_config", {"1": {"num_experts": 2}}, "no "),
      ]),
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
    ("deepseek_v3", "scoring_func", "softmax", "'sigmoid'"),
    ("deepseek_v3", "attention_bias", True, "false"),
    ("qwen3_moe", "use_sliding_window", True, "false"),
    ("qwen3_moe", "partial_rotary_factor", 0.5, "1 or null"),
    ("qwen3_moe", "qkv_bias", True, "false"),
    ("qwen3_moe", "use_qk_norm", False, "true"),
    ("qwen3_moe", "topk_method", "noaux_tc", "'greedy'"),
    ("qwen3_moe", "n_group", 8, "1 or null"),
    ("qwen3_moe", "mlp_layer_types", ["dense"] * 48, "'sparse'"),
    ("qwen3_moe", "shared_expert_intermediate_size", 64, "no "),
    ("llama", "mlp_bias", True, "no "),
    ("llama", "num_experts", 8, "no "),
    ("mistral", "layer_types", ["full_attention"] * 32, "'sliding_attention'"),
    ("gpt_oss", "experts_per_token", 3, "4"),
    ("gpt_oss", "norm_topk_prob", False, "true"),
    ("gpt_oss", "qkv_bias", False, "true"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "name", "value", "supported"), UNSUPPORTED)
def test_an_unsupported_field_or_value_is_named(
    model_type: str, name: str, value: Any, supported: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_hugging_face(FILES[model_type] | {name: value})
    message = str(raised.value)
    if isinstance(value, list) and len(value) > 1:  # only the first entry that differs
        name, value = f"{name}[0]", value[0]
    shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    assert message.startswith(f"{name} = {shown} is not supported for {model_type}: ")
    assert supported in message.partition(": ")[2]
    assert "\n" not in message
    assert len(message) < 300


def test_yarn_without_an_original_length_takes_the_whole_one_as_transformers_does() -> None:
    scaling = {"type": "yarn", "factor": 4, "beta_fast": None}
    config = config_from_hugging_face(FILES["qwen3_moe"] | {"rope_scaling": scaling})
    assert config.rope_scaling == YarnConfig(4.0, 40960)


def test_quantized_weights_are_not_written() -> None:
    config = config_from_hugging_face(FILES["gpt_oss"])
    assert "quantization_config" not in config_to_hugging_face(config)
