"""Fields of `config.json` that transformers has, or that nothing reads: the same function is built,
or they are refused, or a note names them."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lather.errors import ExchangeError
from lather.models.families import FAMILIES
from lather.models.hf.config_json import (
    config_from_hugging_face,
    config_to_hugging_face,
    unread_fields,
)
from lather.models.hf.known_fields import NO_INFLUENCE
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import (
    load_hugging_face,
    model_from_hugging_face,
    notes_on_config,
)
from models.tiny import error, tiny_config, tiny_family_config, tiny_family_model

pytest.importorskip("transformers")
import transformers

from models.twins import EAGER, TOKENS


def test_fields_that_no_code_reads_are_passed_over_and_named_once(tmp_path: Path) -> None:
    config, model = tiny_family_config("qwen3_moe"), tiny_family_model("qwen3_moe")
    save_hugging_face(model, config, tmp_path / "folder")
    assert notes_on_config(tmp_path / "folder") == []
    file = tmp_path / "folder/config.json"
    more = {"surprise": 3, "of_a_tool": {"a": 1}, "nothing": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    assert notes_on_config(tmp_path / "folder") == [
        f"{file}: no code for qwen3_moe reads surprise, of_a_tool: passed over"
    ]
    with pytest.warns(UserWarning, match="surprise, of_a_tool: passed over"):
        loaded, loaded_config = model_from_hugging_face(tmp_path / "folder")
    assert loaded_config == config
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


# --- Against transformers -----------------------------------------------------------------------

LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
}
"""Fields without which the defaults of transformers are no model, or have odd rotary embeddings."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_of_transformers_classes_come_back(family: str) -> None:
    """Read by our configuration, written by it and read by transformers, no field that has
    influence is another; fields that we write and the class lacks are passed over there."""
    cls = config_class(family)
    theirs = cls(**LACKING.get(family, {}))
    before = json.loads(theirs.to_json_string(use_diff=False)) | {"model_type": family}
    config = config_from_hugging_face(before)
    assert unread_fields(before, FAMILIES[family]) == []
    written = json.loads(json.dumps(config_to_hugging_face(config)))
    again = cls.from_dict({**written, "model_type": theirs.model_type})
    after = json.loads(again.to_json_string(use_diff=False)) | {"model_type": family}
    assert config_from_hugging_face(after) == config
    whole = after.get("rope_parameters", {})
    if whole.get("partial_rotary_factor") == 1.0:  # as if left out
        del whole["partial_rotary_factor"]
    differs = {name for name, value in before.items() if after.get(name) != value} - NO_INFLUENCE
    assert all(before[name] is None for name in differs - {"text_config"}), differs


def config_class(family: str) -> Any:
    """Return transformers' configuration class of a family, which may be that of another name."""
    if family in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[family]
    return getattr(transformers, FAMILIES[family].architecture).config_class


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
ROPES: list[Any] = [
    YARN,
    YARN | {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9},
    YARN | {"truncate": False, "attention_factor": 0.8, "beta_fast": 8.0},
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
ALWAYS = ("deepseek_v2", "gpt_oss", "qwen3_moe")
CHANGED = [
    pytest.param(family, marks=[pytest.mark.grid] * (family not in ALWAYS))
    for family in FAMILIES
    if family != "qwen3_5_moe"  # its fields are those of qwen3_5_moe_text
]
LEAST_BUILT = 20
"""The least number of changes of a family that are built."""


@pytest.fixture
def _quiet() -> None:
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


def sizes_of(family: str) -> dict[str, Any]:
    """Return the fields of a tiny model, with which transformers' class is made."""
    fields = config_to_hugging_face(tiny_family_config(family))
    for name in ("model_type", "architectures", "rope_theta", "rope_scaling"):
        del fields[name]
    return {**fields, "pad_token_id": None}


def changes_of(family: str) -> list[tuple[str, Any]]:
    defaults = {
        field.name: sizes_of(family).get(field.name, field.default)
        for field in dataclasses.fields(config_class(family))
    }
    return [
        (name, value)
        for name in {**defaults, **dict.fromkeys(OTHER_VALUES)}
        for value in other_values(name, defaults.get(name))
        if value != defaults.get(name) and (family, name) not in OTHER_FUNCTION
    ]


def make_model(family: str, **changes: Any) -> nn.Module:
    """Make a model of transformers whose weights all differ: norms about 1, the others about 0."""
    # transformers writes into what it is given
    config = config_class(family)(**copy.deepcopy({**sizes_of(family), **changes}), **EAGER)
    model: nn.Module = getattr(transformers, FAMILIES[family].architecture)(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.state_dict().items():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5, generator=generator)
        else:
            nn.init.normal_(weight, 0, 0.15, generator=generator)
    return model


def outcome(family: str, changes: dict[str, Any], folder: Path) -> str:
    """Return how transformers and Lather, which reads the folder that transformers writes, agree
    about a changed configuration."""
    try:
        theirs = make_model(family, **changes).eval().float()
        with torch.no_grad():
            expected = theirs(TOKENS).logits
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
@pytest.mark.parametrize("family", CHANGED)
def test_every_field_that_transformers_has_gives_its_logits_or_is_refused(
    family: str, tmp_path: Path
) -> None:
    """The fields are changed one by one, and then three together."""
    outcomes: dict[str, list[Any]] = {}
    changes, chance = changes_of(family), random.Random(0)
    together = [chance.sample(changes, 3) for _ in range(30)]
    for number, changed in enumerate([*([change] for change in changes), *together]):
        result = outcome(family, dict(changed), tmp_path / str(number))
        outcomes.setdefault(result, []).append(changed)
    assert outcomes.keys() <= {"equal", "refused", "not built by transformers"}, outcomes
    assert sum(len(changed) == 1 for changed in outcomes["equal"]) >= LEAST_BUILT
