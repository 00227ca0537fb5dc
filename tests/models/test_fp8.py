"""Weights in block-scaled FP8 against a loop over blocks and against transformers; their errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lather.errors import ExchangeError
from lather.models.families.deepseek_v3 import DeepseekV3Config
from lather.models.hf.fp8 import dequantize_fp8
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face, open_hugging_face
from lather.safetensors_file import Index
from models.tiny import error, tiny_family_config, tiny_family_model

SIZES = {"hidden_size": 136, "moe_intermediate_size": 130, "num_hidden_layers": 2, "vocab_size": 37}
"""Widths just above a block, so that blocks are cut off."""
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def blocks(shape: torch.Size) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    return [
        ((y, z), (slice(128 * y, 128 * y + 128), slice(128 * z, 128 * z + 128)))
        for y in range(-(-shape[0] // 128))
        for z in range(-(-shape[1] // 128))
    ]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the largest element of each block to the largest E4M3 number, as publishers do."""
    elements = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    factors = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for place, block in blocks(weight.shape):
        factors[place] = weight[block].abs().max() / 448
        elements[block] = (weight[block] / factors[place]).to(torch.float8_e4m3fn)
    return elements, factors


def reference(elements: Tensor, factors: Tensor) -> Tensor:
    weight = torch.empty(elements.shape)
    for place, block in blocks(elements.shape):
        weight[block] = elements[block].float() * factors[place].float()
    return weight


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight") or "proj_with_mqa" in name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "fp8", SIZES)


def make_folder(folder: Path, sizes: dict[str, int]) -> Path:
    """Make a folder as DeepSeek-V3 is published: linear layers and experts in FP8, the rest in
    bf16."""
    config = tiny_family_config("deepseek_v3", **sizes)
    model = tiny_family_model("deepseek_v3", **sizes)
    save_hugging_face(model, config, folder, dtype=torch.bfloat16)
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | {"quantization_config": QUANTIZATION}
    file.write_text(json.dumps(fields))
    edit(folder, quantize)
    return folder


def quantize(tensors: dict[str, Tensor]) -> None:
    for name in list(filter(is_quantized, tensors)):
        tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensors[name].float())


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def expected_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {
        name: reference(tensor, tensors[f"{name}_scale_inv"])
        if tensor.dtype == torch.float8_e4m3fn
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def test_every_block_has_its_factor_and_its_rows_can_be_read_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    elements, factors = quantized(torch.randn(300, 260, generator=generator))
    expected = reference(elements, factors)
    assert torch.equal(dequantize_fp8(elements, factors), expected)
    for first, last in [(0, 128), (100, 290), (255, 256), (256, 300)]:
        rows = dequantize_fp8(elements[first:last], factors, first)
        assert torch.equal(rows, expected[first:last])
    assert error(1.01 * expected, expected) > 1e-3


def test_a_folder_comes_in_as_the_loop_over_blocks_says_in_fp32_and_bf16(folder: Path) -> None:
    expected = expected_tensors(folder)
    for dtype in (torch.float32, torch.bfloat16):
        model, config = model_from_hugging_face(folder, dtype=dtype)
        assert isinstance(config, DeepseekV3Config)
        weights = dict(model.named_parameters())
        for name in ("self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.weight"):
            published = expected[f"model.layers.1.{name}"]
            assert torch.equal(weights[f"layers.1.{name}"], published.to(dtype))
        experts = weights["layers.1.mlp.experts.gate_up_proj"]
        for expert in range(5):
            halves = (
                expected[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"].to(dtype)
                for name in ("gate", "up")
            )
            assert torch.equal(experts[expert], torch.cat(list(halves)))
        bias = model.get_buffer("layers.1.mlp.gate.e_score_correction_bias")
        assert bias.dtype == torch.float32
        assert torch.equal(bias, expected["model.layers.1.mlp.gate.e_score_correction_bias"])
    source = open_hugging_face(folder)[0]
    name = "layers.0.self_attn.o_proj.weight"
    rows: list[int | slice] = [120, slice(120, 136), slice(-8, None), slice(None, 8), slice(None)]
    indices: list[Index] = [*((each,) for each in rows), (slice(129, 130), slice(20, 24)), ()]
    for index in indices:
        assert torch.equal(source.read(name, index), expected[f"model.{name}"][index]), index


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """It reads blocks that are cut off only where there is one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = make_folder(
        tmp_path / "fp8", SIZES | {"hidden_size": 256, "moe_intermediate_size": 64}
    )
    ours, _ = model_from_hugging_face(folder, dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        published = name if name.startswith("lm_head") else f"model.{name}"
        assert torch.equal(weight, weights[published]), name


MISTAKES: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (
        lambda t: t.pop(f"{DOWN}_scale_inv"),
        rf"'{DOWN}' is of dtype F8_E4M3 and lacks its factors, '{DOWN}_scale_inv': give them",
    ),
    (
        lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 1)}),
        rf"'{DOWN}_scale_inv' has shape \(2, 1\), but '{DOWN}' asks for \(2, 2\): ",
    ),
    (
        lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 2).to(torch.float8_e4m3fn)}),
        rf"'{DOWN}_scale_inv' is of dtype F8_E4M3, which is not supported",
    ),
    (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        "lacks its factors, 'model.norm.weight_scale_inv'",
    ),
    (
        lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(2)}),
        "has a surplus 'model.norm.weight_scale_inv'",
    ),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES)
def test_wrong_factors_are_one_error_each(
    change: Callable[[dict[str, Tensor]], object], words: str, folder: Path
) -> None:
    edit(folder, change)
    with pytest.raises(ExchangeError, match=words) as raised:
        model_from_hugging_face(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"weight_block_size": [64, 64]},
            r"quantization_config.weight_block_size = \[64, 64\] is not .* must be \[128, 128\]",
        ),
        ({"weight_block_size": "fp8"}, r"weight_block_size = 'fp8' is not .* must be \[128, 128\]"),
        ({"weight_block_size": None}, r"weight_block_size = null is not .* must be \[128, 128\]"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq' is not supported .* must be 'fp8'"),
    ],
)
def test_other_quantizations_are_refused(
    change: dict[str, object], words: str, folder: Path
) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["quantization_config"] |= change
    file.write_text(json.dumps(fields))
    with pytest.raises(ExchangeError, match=words):
        model_from_hugging_face(folder)
