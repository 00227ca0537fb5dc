"""Folders of every family that are not what a family's model is built from: one line each, before
anything is written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from lather.cli import main
from lather.errors import ExchangeError
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import open_hugging_face
from models.tiny import FAMILY_TABLES, KINDS, tiny_family_config, tiny_family_model

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BY_ALL: Mapping[str, Any] = {
    "model_type": "mamba",
    "hidden_act": "gelu",
    "attention_dropout": 0.1,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0},
    "quantization_config": {"quant_method": "awq"},
    "vocab_size": "37",
    "num_hidden_layers": 0,
}
"""Fields that no family supports with these values."""


@pytest.fixture(scope="module", params=FAMILY_TABLES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good model of each family, which is called as the family is."""
    family: str = request.param
    folder = tmp_path_factory.mktemp("good") / family
    save_hugging_face(
        tiny_family_model(family, vocab_size=300),
        tiny_family_config(family, vocab_size=300),
        folder,
    )
    return folder


def refusal(folder: Path) -> str:
    """Return the message of the error with which the folder is refused, after its file's name."""
    with pytest.raises(ExchangeError) as raised:
        open_hugging_face(folder)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message.removeprefix(str(folder))


def text_fields(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of `config.json`, and the part of it that has the text model's fields."""
    content = json.loads((folder / CONFIG).read_text())
    return content, content.get("text_config", content)


def kinds_of_tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the last name of each kind: those that differ in numbers alone are of a kind."""
    yield from {re.sub(r"\.\d+\.", ".N.", name): name for name in tensors}.values()


def test_a_field_that_is_not_supported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").mkdir()
    shutil.copy(folder / WEIGHTS, tmp_path / "bad")
    for name, value in {**BY_ALL, **FAMILY_TABLES[folder.name].refused}.items():
        content, fields = text_fields(folder)
        (content if name == "model_type" else fields)[name] = value
        (tmp_path / "bad" / CONFIG).write_text(json.dumps(content))
        assert name in refusal(tmp_path / "bad"), name
    assert_no_run_is_made(tmp_path / "bad", capsys)


def test_a_field_that_is_missing(folder: Path, tmp_path: Path) -> None:
    """Only fields of which there are no defaults: the sizes."""
    shutil.copytree(folder, tmp_path / "bad")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        content, fields = text_fields(folder)
        del fields[name]
        (tmp_path / "bad" / CONFIG).write_text(json.dumps(content))
        assert f"missing fields: {name}" in refusal(tmp_path / "bad")


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(family, marks=[pytest.mark.grid] * (family not in KINDS))
        for family in FAMILY_TABLES
    ],
    indirect=True,
)
def test_a_tensor_that_is_missing_or_has_another_shape_or_is_too_many(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor of every kind that the family publishes."""
    shutil.copytree(folder, tmp_path / "bad")
    tensors = load_file(folder / WEIGHTS)
    for name in kinds_of_tensors(tensors):
        tensor = tensors[name]
        rest = {key: value for key, value in tensors.items() if key != name}
        longer = tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        save_file(rest, tmp_path / "bad" / WEIGHTS)
        assert f"lacks {name!r}" in refusal(tmp_path / "bad")
        save_file({**rest, name: longer}, tmp_path / "bad" / WEIGHTS)
        message = refusal(tmp_path / "bad")
        assert all(
            words in message for words in (name, str(tuple(tensor.shape)), str(tuple(longer.shape)))
        )
        assert_no_run_is_made(tmp_path / "bad", capsys)
    save_file({**tensors, "model.layers.1.left.weight": longer}, tmp_path / "bad" / WEIGHTS)
    assert "surplus 'model.layers.1.left.weight'" in refusal(tmp_path / "bad")


def assert_no_run_is_made(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that `lather import` says one line, and leaves nothing behind."""
    assert main(["import", str(bad), str(bad.parent / "run")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.name for path in bad.parent.iterdir()] == ["bad"]
