"""A Hugging Face folder read entry by entry gives the weights that reading it as a whole gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lather.models.entry_names import split_entry
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import open_hugging_face
from models.tiny import tiny_family_config, tiny_family_model


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_every_entry_and_its_rows(family: str, tmp_path: Path) -> None:
    model = tiny_family_model(family)
    save_hugging_face(model, tiny_family_config(family), tmp_path / "published")
    tensors = open_hugging_face(tmp_path / "published")[0]
    found = set()
    for name, described in tensors.tensors.items():
        parameter, at = split_entry(name)
        expected = model.get_parameter(parameter).detach()[at]
        assert described.shape == tuple(expected.shape)
        assert torch.equal(tensors.read(name), expected), name
        assert torch.equal(tensors.read(name, (slice(1, 4),)), expected[1:4]), name
        found.add((parameter, at))
    assert {parameter for parameter, _ in found} == {name for name, _ in model.named_parameters()}
    assert len({at for parameter, at in found if parameter.endswith("experts.down_proj")}) == 5
