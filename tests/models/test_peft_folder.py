"""Adapters in PEFT's format: PEFT loads them, and computes what Lather does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lather.checkpoint.folder import Progress, Retention
from lather.checkpoint.reader import open_checkpoint
from lather.checkpoint.save import save_checkpoint
from lather.checkpoint.state import TrainingState
from lather.errors import ExchangeError
from lather.models.adapted import MergedTensors, add_adapters, is_adapters
from lather.models.decoder import Decoder
from lather.models.families import ModelConfig
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.peft_folder import save_peft
from lather.models.lora import LoraConfig
from lather.safetensors_file import TensorSource
from models.tiny import error, random_tokens, tiny_family_config, tiny_family_model

CASES = {
    "qwen3_moe": [
        ("attention", "experts"),
        ("*.q_proj", "layers.1.mlp.experts.gate_up_proj"),
        ("experts",),
        ("*.experts.down_proj",),
    ],
    "deepseek_v2": [
        ("attention", "experts", "dense", "shared_experts"),
        ("layers.2.self_attn.kv_b_proj", "dense"),
    ],
    "qwen3_next": [("attention", "experts", "shared_experts")],
    "qwen3_5_moe": [("*.in_proj_qkv", "*.out_proj", "layers.1.self_attn.q_proj")],
    "gpt_oss": [("attention", "experts"), ("layers.[01].*",)],
}


def model_and_weights(
    family: str, lora: LoraConfig, folder: Path
) -> tuple[Decoder, ModelConfig, TensorSource]:
    """Write the model's own weights to `folder`/base, in Hugging Face's format; return the model
    with adapters whose B is not zero."""
    model, config = tiny_family_model(family), tiny_family_config(family)
    save_hugging_face(model, config, folder / "base")
    add_adapters(model, lora)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if is_adapters(name):
            torch.nn.init.normal_(p, std=0.2, generator=generator)
    state, progress = TrainingState.of_model(model), Progress(1, 0.0)
    checkpoint = save_checkpoint(folder / "checkpoints", progress, state, retention=Retention(1))
    return model, config, open_checkpoint(checkpoint).weights()


@pytest.mark.parametrize(
    ("family", "targets"),
    [(family, targets) for family, all_of in CASES.items() for targets in all_of],
    ids=str,
)
def test_peft_computes_the_same_and_so_does_the_merged_model(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = LoraConfig(rank=3, alpha=7.0, targets=targets)
    model, config, weights = model_and_weights(family, lora, tmp_path)
    save_peft(weights, config, lora, tmp_path / "adapter", base=str(tmp_path / "base"))
    save_hugging_face(MergedTensors(weights, lora.scale), config, tmp_path / "merged")

    tokens = random_tokens(2, 9)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **eager)
    with torch.no_grad():
        ours, without = model(tokens).logits_BSV, base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **eager)(
            tokens
        ).logits
    assert error(adapted, ours) < 1e-5
    assert error(merged, ours) < 1e-5
    assert error(without, ours) > 0.01


def test_names_shapes_and_configuration(tmp_path: Path) -> None:
    targets = ("*.o_proj", "layers.0.self_attn.k_proj", "*.gate_up_proj", "layers.2.mlp.experts.*")
    lora = LoraConfig(rank=2, alpha=6.0, targets=targets)
    model, config, weights = model_and_weights("qwen3_moe", lora, tmp_path)
    save_peft(weights, config, lora, tmp_path / "adapter", base="some/model", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    assert {
        name: tuple(x.shape) for name, x in stored.items() if ".0." in name or ".2.mlp." in name
    } == {
        f"{prefix}.0.self_attn.k_proj.lora_A.weight": (2, 24),
        f"{prefix}.0.self_attn.k_proj.lora_B.weight": (20, 2),
        f"{prefix}.0.self_attn.o_proj.lora_A.weight": (2, 60),
        f"{prefix}.0.self_attn.o_proj.lora_B.weight": (24, 2),
        f"{prefix}.0.mlp.experts.lora_A.weight": (10, 24),
        f"{prefix}.0.mlp.experts.lora_B.weight": (22, 10),
        f"{prefix}.2.mlp.experts.base_layer.lora_A.weight": (10, 24),
        f"{prefix}.2.mlp.experts.base_layer.lora_B.weight": (22, 10),
        f"{prefix}.2.mlp.experts.lora_A.weight": (10, 11),
        f"{prefix}.2.mlp.experts.lora_B.weight": (24, 10),
    }
    a, b = (
        stored[f"{prefix}.2.mlp.experts.lora_{factor}.weight"].view(shape)
        for factor, shape in {"A": (5, 2, 11), "B": (24, 2, 5)}.items()
    )
    adapter = model.get_submodule("layers.2.mlp.experts.down_lora")
    assert torch.equal(a, adapter.A.bfloat16())
    assert torch.equal(b.permute(2, 0, 1), adapter.B.bfloat16())
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    names = ("r", "lora_alpha", "base_model_name_or_path", "target_modules", "target_parameters")
    assert [settings[name] for name in names] == [
        *(2, 6.0, "some/model", ["layers.0.self_attn.k_proj", "o_proj"]),
        ["mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"],
    ]


def test_weights_without_the_adapters_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    _, config, weights = model_and_weights(
        "qwen3_moe", LoraConfig(rank=2, targets=("experts",)), tmp_path
    )
    with pytest.raises(
        ExchangeError, match=r"'layers.0.self_attn.q_proj.lora.A' is not among the weights"
    ):
        save_peft(weights, config, LoraConfig(rank=2), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
