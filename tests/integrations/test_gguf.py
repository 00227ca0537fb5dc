"""The names that llama.cpp's own package knows: those of the tensors that we export."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.integrations
gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from safetensors import safe_open

from lather.models.families import FAMILIES
from lather.models.hf.model_export import save_hugging_face
from models.tiny import tiny_family_config, tiny_family_model

ARCHITECTURES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), "DEEPSEEK2"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "LLAMA"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "QWEN35MOE"),
    "minimax_m2": "MINIMAXM2",
    "qwen3_moe": "QWEN3MOE",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_next": "QWEN3NEXT",
}
"""Architectures of llama.cpp; those not given have the family's name."""
RENAMED = {
    r"e_score_correction_bias$": "e_score_correction.bias",
    r"\.dt_bias$": ".dt_proj.bias",
    r"^model\.language_model\.": "model.",
    r"experts\.(\w+_proj)_bias$": r"experts.\1.bias",
    r"experts\.gate_up_proj(\.bias)?$": r"experts.gate_proj\1",
    r"experts\.(gate|down)_proj$": r"experts.\1_proj.weight",
    r"experts\.\d+\.": "experts.",
}
"""Changes of names that the converter makes before it looks them up: it stacks experts, and divides
gate and up projections."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_a_place_in_gguf(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(family) / "out"
    save_hugging_face(tiny_family_model(family), tiny_family_config(family), folder)
    architecture = gguf.MODEL_ARCH[ARCHITECTURES.get(family, family.upper())]
    known = gguf.get_tensor_name_map(architecture, 16)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                renamed = name
                for pattern, text in RENAMED.items():
                    renamed = re.sub(pattern, text, renamed)
                assert known.get_name(renamed, (".weight", ".bias")), (name, renamed)
    assert known.get_name("model.layers.0.mlp.no_proj.weight", (".weight",)) is None
