"""Folders of Qwen3.5-MoE as they are published: the text model's fields are nested, and the weights
of images and of multi-token prediction, which are left out with a note, lie beside its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lather.errors import ExchangeError
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face, notes_on_config, read_config
from lather.train.companions import ends_of
from models.tiny import error, tiny_family_config, tiny_family_model

pytest.importorskip("transformers")
import transformers

from models.twins import EAGER, TOKENS, TOLERANCE

PUBLISHED = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,
}
"""Fields of the published text models that transformers does not write."""
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 4,
    "patch_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with the weights of a tiny text model, of a vision model and of a block for
    multi-token prediction."""
    path = tmp_path_factory.mktemp("published") / "model"
    ours = tiny_family_model("qwen3_5_moe")
    plain = path.with_name("plain")
    save_hugging_face(ours, tiny_family_config("qwen3_5_moe"), plain)
    fields = json.loads((plain / "config.json").read_text("utf-8"))
    config = transformers.Qwen3_5MoeConfig(
        text_config=fields["text_config"], vision_config=VISION, **EAGER
    )
    whole = transformers.Qwen3_5MoeForConditionalGeneration(config)
    text = load_file(plain / "model.safetensors")
    missing, unexpected = whole.load_state_dict(text, strict=False)
    assert unexpected == []
    assert all(name.startswith("model.visual.") for name in missing)
    whole.save_pretrained(path)
    file = path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(2, 2)}, file)
    saved = json.loads((path / "config.json").read_text("utf-8"))
    rope = saved["text_config"]["rope_parameters"]
    rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    saved["text_config"] |= PUBLISHED
    (path / "config.json").write_text(json.dumps(saved), "utf-8")
    return path


def changed(folder: Path, tmp_path: Path, **fields: Any) -> Path:
    """Copy the configuration with other fields."""
    saved = json.loads((folder / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(saved | fields), "utf-8")
    return tmp_path


def test_the_text_model_is_read_and_the_rest_is_left_out_with_a_note(folder: Path) -> None:
    with pytest.warns(UserWarning, match="are left out") as warned:
        model, config = model_from_hugging_face(folder)
    assert len(warned) == 1
    assert config == tiny_family_config("qwen3_5_moe")
    (note,) = notes_on_config(folder)
    others = [name for name in load_file(folder / "model.safetensors") if "language" not in name]
    assert f" and {len(others) - 2} more" in note  # the head is the text model's
    text = transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER)
    with torch.no_grad():
        assert error(model(TOKENS).logits_BSV, text(TOKENS).logits) < TOLERANCE  # type: ignore[arg-type]


def test_ids_of_tokens_may_be_those_of_the_text_model(tmp_path: Path) -> None:
    model, config = tiny_family_model("qwen3_5_moe"), tiny_family_config("qwen3_5_moe")
    save_hugging_face(model, config, tmp_path / "in")
    saved = json.loads((tmp_path / "in/config.json").read_text("utf-8"))
    saved["text_config"] |= {"eos_token_id": [7, 8], "pad_token_id": 3}
    (tmp_path / "in/config.json").write_text(json.dumps(saved | {"eos_token_id": None}), "utf-8")
    assert ends_of(tmp_path / "in") == [7, 8]
    save_hugging_face(model, config, tmp_path / "out", tokenizer=tmp_path / "in")
    for name in ("in", "out"):
        text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        generation = text.generation_config
        assert (generation.eos_token_id, generation.pad_token_id) == ([7, 8], 3)


def test_what_is_no_text_model_is_refused_in_a_line(folder: Path, tmp_path: Path) -> None:
    for fields, message in (
        ({"text_config": None}, "text_config = null is not valid: it must hold the fields"),
        ({"text_config": [1]}, r"text_config = \[1\] is not valid"),
        ({"architectures": ["Other"]}, "must be .*Qwen3_5MoeForCausalLM.* or .*Conditional"),
    ):
        with pytest.raises(ExchangeError, match=message):
            read_config(changed(folder, tmp_path, **fields))
