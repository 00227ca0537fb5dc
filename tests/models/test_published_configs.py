"""Fields of `config.json` that transformers has, or that nothing reads: the same function is built,
or they are refused, or a note names them."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.errors import ExchangeError
from lather.models.hf.config_json import config_to_hugging_face
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import (
    load_hugging_face,
    model_from_hugging_face,
    notes_on_config,
)
from models.tiny import error, tiny_config, tiny_family_config, tiny_family_model


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
        field.name: sizes.get(field.name, field.default)
        for field in dataclasses.fields(transformers.CONFIG_MAPPING[family])
    }
    return [
        (name, value)
        for name in {**defaults, **dict.fromkeys(OTHER_VALUES)}
        for value in other_values(name, defaults.get(name))
        if value != defaults.get(name) and (family, name) not in OTHER_FUNCTION
    ]


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
    """The fields are changed one by one, and then three together."""
    outcomes: dict[str, list[Any]] = {}
    changes, chance = changes_of(family), random.Random(0)
    together = [chance.sample(changes, 3) for _ in range(30)]
    for number, changed in enumerate([*([change] for change in changes), *together]):
        result = outcome(family, dict(changed), tmp_path / str(number))
        outcomes.setdefault(result, []).append(changed)
    assert outcomes.keys() <= {"equal", "refused", "not built by transformers"}, outcomes
    assert sum(len(changed) == 1 for changed in outcomes["equal"]) >= EXPECTED[family]
