"""Configurations as they are published, and as the classes of transformers write them: the same
function is built, or they are refused.

The published files are those of the models' authors; the fields that tools add are those that
their versions of 2024 to 2026 write.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.errors import ConfigError, ExchangeError
from lather.models.families import FAMILIES
from lather.models.hf.config_json import (
    config_from_hugging_face,
    config_to_hugging_face,
    unread_fields,
)
from lather.models.hf.known_fields import NEUTRAL, NO_INFLUENCE
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import (
    load_hugging_face,
    model_from_hugging_face,
    notes_on_config,
)
from models.test_config_json import FILES, PUBLISHED_FILES
from models.tiny import error, tiny_config, tiny_family_config, tiny_family_model

QWEN, DEEPSEEK, OSS = (
    PUBLISHED_FILES[name] for name in ("qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b")
)

# --- What is published --------------------------------------------------------------------------

OTHER_PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Coder-30B-A3B-Instruct": {
        **{name: QWEN[name] for name in QWEN if name not in ("attention_bias", "bos_token_id")},
        "intermediate_size": 5472,
        "max_position_embeddings": 262144,
        "max_window_layers": 28,
        "qkv_bias": False,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "transformers_version": "4.52.3",
        "use_qk_norm": True,
    },
    "Qwen3-30B-A3B-Instruct-2507": QWEN
    | {"max_position_embeddings": 262144, "rope_theta": 10000000},
    "Qwen3-235B-A22B": QWEN
    | {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 94,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
    "DeepSeek-V2-Chat": DEEPSEEK
    | {
        "ep_size": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "DeepSeek-Coder-V2-Lite-Instruct": DEEPSEEK | {"ep_size": 1, "max_position_embeddings": 163840},
    "gpt-oss-120b": OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
}


@pytest.mark.parametrize("name", OTHER_PUBLISHED)
def test_a_published_configuration_is_read_whole(name: str) -> None:
    file = OTHER_PUBLISHED[name]
    config = config_from_hugging_face(json.loads(json.dumps(file)))
    assert unread_fields(file) == []
    assert config_from_hugging_face(config_to_hugging_face(config)) == config


def test_the_coder_model_is_what_its_fields_say() -> None:
    """The fields beside those of Qwen3-30B-A3B say what is built anyway."""
    coder = config_from_hugging_face(OTHER_PUBLISHED["Qwen3-Coder-30B-A3B-Instruct"])
    changes = {
        "intermediate_size": 5472,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "router_aux_loss_coef": 0.0,
    }
    assert coder == dataclasses.replace(config_from_hugging_face(QWEN), **changes)


OF_TOOLS: list[tuple[str, dict[str, Any]]] = [
    (
        "unsloth",
        {
            "unsloth_fixed": True,
            "unsloth_version": "2025.9.4",
            "model_name": "unsloth/X",
            "pad_token_id": 151654,
        },
    ),
    (
        "transformers 4",
        {
            "_attn_implementation_autoset": True,
            "torch_dtype": "bfloat16",
            "_name_or_path": "x",
            "use_cache": False,
        },
    ),
    (
        "transformers 5",
        {
            "dtype": "bfloat16",
            "_experts_implementation": "grouped_mm",
            "id2label": {"0": "LABEL_0"},
            "label2id": {},
        },
    ),
    (
        "generation",
        {
            "temperature": 0.6,
            "top_p": 0.95,
            "do_sample": True,
            "max_length": 20,
            "num_beams": 1,
            "bad_words_ids": None,
        },
    ),
    (
        "transformers 4 base",
        {
            "torchscript": False,
            "pruned_heads": {},
            "add_cross_attention": False,
            "tie_encoder_decoder": False,
        },
    ),
    (
        "neutral",
        {
            "router_jitter_noise": 0.0,
            "hidden_dropout": 0.0,
            "partial_rotary_factor": 1.0,
            "final_logit_softcapping": None,
        },
    ),
    (
        "classes with all fields",
        {
            "mlp_layer_types": None,
            "n_group": None,
            "is_decoder": False,
            "is_encoder_decoder": False,
        },
    ),
]


@pytest.mark.parametrize("model_type", FILES)
@pytest.mark.parametrize(("tool", "fields"), OF_TOOLS, ids=[tool for tool, _ in OF_TOOLS])
def test_fields_of_tools_that_change_nothing_are_accepted(
    model_type: str, tool: str, fields: dict[str, Any]
) -> None:
    file = FILES[model_type] | fields
    assert config_from_hugging_face(file) == config_from_hugging_face(FILES[model_type])
    assert unread_fields(file) == []


AGREEING: list[tuple[str, str, Any]] = [
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


@pytest.mark.parametrize(("model_type", "name", "value"), AGREEING)
def test_a_field_that_says_what_is_built_is_accepted(
    model_type: str, name: str, value: Any
) -> None:
    file = FILES[model_type] | {name: value}
    assert config_from_hugging_face(file) == config_from_hugging_face(FILES[model_type])
    assert unread_fields(file) == []


# --- Fields that nothing reads ------------------------------------------------------------------


def test_fields_that_no_code_reads_are_passed_over_and_named_once(tmp_path: Path) -> None:
    config, model = tiny_family_config("qwen3_moe"), tiny_family_model("qwen3_moe")
    save_hugging_face(model, config, tmp_path / "folder")
    assert notes_on_config(tmp_path / "folder") == []
    file = tmp_path / "folder/config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"surprise": 3, "of_a_tool": {"a": 1}, "nothing": None}
        )
    )
    assert notes_on_config(tmp_path / "folder") == [
        f"{file}: no code for qwen3_moe reads surprise, of_a_tool: passed over"
    ]
    with pytest.warns(UserWarning, match="surprise, of_a_tool: passed over"):
        loaded, found = model_from_hugging_face(tmp_path / "folder")
    assert found == config
    assert all(
        torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True)
    )
    with pytest.warns(UserWarning, match="surprise, of_a_tool: passed over"):
        load_hugging_face(tmp_path / "folder", model)


def test_a_field_that_transformers_ignores_and_lather_obeys_is_named(tmp_path: Path) -> None:
    for normalizes in (False, True):
        (tmp_path / "config.json").write_text(
            json.dumps(config_to_hugging_face(tiny_config(norm_topk_prob=normalizes)))
        )
        assert [note[:35] for note in notes_on_config(tmp_path)] == [
            "transformers ignores norm_topk_prob"
        ] * normalizes


@pytest.mark.parametrize("model_type", FILES)
def test_a_field_of_other_models_is_refused_unless_it_is_off(model_type: str) -> None:
    file = FILES[model_type]
    family = FAMILIES[model_type]
    own = {field.name for field in dataclasses.fields(family.config)} | family.ignored
    others = sorted(NEUTRAL.keys() - own - family.written.keys())
    assert len(others) > 80
    for name in others:
        assert config_from_hugging_face(file | {name: None}) == config_from_hugging_face(file)
        with pytest.raises(
            ConfigError, match=rf"^{name} = 7 is not supported for {model_type}: it must be "
        ):
            config_from_hugging_face(file | {name: 7})


def test_no_field_is_in_two_lists() -> None:
    assert not NO_INFLUENCE & NEUTRAL.keys()


# --- Against transformers -----------------------------------------------------------------------

ROPES: list[Any] = [
    {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
    {
        "rope_type": "yarn",
        "rope_theta": 50.0,
        "factor": 3.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "truncate": False,
        "attention_factor": 0.8,
        "beta_fast": 8.0,
    },
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
]
SLIDING, FULL = "sliding_attention", "full_attention"
OTHER_VALUES: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "hidden_act": ["gelu", "swish"],
    "layer_types": [[FULL] * 3, [FULL, SLIDING, FULL], [SLIDING] * 3],
    "topk_method": ["group_limited_greedy"],
    "mlp_only_layers": [[0, 2], [], None],
    "dtype": ["bfloat16"],
    "problem_type": ["regression"],
    "is_causal": [False],
    "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [32],
    "sliding_window": [3],
    "use_sliding_window": [True],
    "is_encoder_decoder": [True],
    "per_layer_config": [{"1": {"attention_dropout": 0.5}}],
    "rope_theta": [55.0],
    "unsloth_fixed": [True],
    "of_no_tool": [3],
}
"""Values other than the default of fields of the configuration classes, and of fields that they
take besides."""
OTHER_FUNCTION = {("deepseek_v2", "norm_topk_prob")}
"""Fields that Lather obeys, as the authors' code does, and transformers ignores; `notes_on_config`
says so."""
EXPECTED = {"deepseek_v2": 40, "qwen3_moe": 30, "gpt_oss": 30}
"""The least number of changes of each family that are built."""


@pytest.fixture
def _quiet() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def other_values(name: str, value: Any) -> list[Any]:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    return [value + 0.3, 0.0] if isinstance(value, float) else [2, True] if value is None else []


def changes_of(family: str) -> list[tuple[str, Any]]:
    published = pytest.importorskip("models.published")
    import transformers

    sizes = published.COMMON | published.FAMILIES[family]
    defaults = {
        one.name: sizes.get(one.name, one.default)
        for one in dataclasses.fields(transformers.CONFIG_MAPPING[family])
    }
    names = {**defaults, **dict.fromkeys(OTHER_VALUES)}
    changes = [
        (name, value)
        for name in names
        for value in other_values(name, defaults.get(name))
        if value != defaults.get(name)
    ]
    return [change for change in changes if (family, change[0]) not in OTHER_FUNCTION]


def outcome(family: str, changes: dict[str, Any], folder: Path) -> str:
    """Return how transformers and Lather, which reads the folder that transformers writes, agree
    about a changed configuration."""
    from models.published import TOKENS, logits, make_model

    try:
        theirs = make_model(family, **changes).eval().float()
        expected = logits(theirs)
        theirs.save_pretrained(folder)
    except Exception:  # whatever transformers raises, it does not build such a model
        return "not built by transformers"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = model_from_hugging_face(folder, dtype=torch.float32)
    except ExchangeError as refused:
        return "refused in several lines" if "\n" in str(refused) else "refused"
    with torch.no_grad():
        return "equal" if error(model(TOKENS).logits_BSV, expected) < 1e-5 else "different"


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("family", EXPECTED)
def test_every_field_that_transformers_has_gives_its_logits_or_is_refused(
    family: str, tmp_path: Path
) -> None:
    found: dict[str, list[Any]] = {}
    for number, (name, value) in enumerate(changes_of(family)):
        found.setdefault(outcome(family, {name: value}, tmp_path / str(number)), []).append(
            (name, value)
        )
    assert found.keys() <= {"equal", "refused", "not built by transformers"}, found
    assert len(found["equal"]) >= EXPECTED[family]


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("family", EXPECTED)
def test_several_fields_together_give_its_logits_or_are_refused(
    family: str, tmp_path: Path
) -> None:
    chance, changes = random.Random(0), changes_of(family)
    for number in range(30):
        chosen = dict(chance.sample(changes, 3))
        assert not outcome(family, chosen, tmp_path / str(number)).startswith(
            ("different", "refused in")
        ), chosen
