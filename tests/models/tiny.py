"""Makes tiny models of every family, whose sizes all differ, and measures how far apart two results
are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.models.decoder import Decoder
from lather.models.families import FAMILIES, ModelConfig, build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.models.token_positions import SequenceLayout
from lather.pipeline.model_part import ModelPart, PartLayers
from models.tiny_family import TinyFamily

FAMILY_TABLES: dict[str, TinyFamily] = {
    model_type: importlib.import_module(f"models.configurations.{model_type}").TINY
    for model_type in FAMILIES
    if Path(__file__).with_name("configurations").joinpath(f"{model_type}.py").exists()
}
"""The tables of the families; `test_battery.py` tests that each has one."""
FAMILY_SIZES = {model_type: dict(table.sizes) for model_type, table in FAMILY_TABLES.items()}
"""Sizes of the families' plain models."""
SIZES = FAMILY_SIZES["deepseek_v2"]
KINDS = ("deepseek_v2", "gpt_oss", "qwen3_moe", "qwen3_next", "llama")
"""Families that stand for all: latent attention, sinks and windows, grouped queries, Gated
DeltaNet, and dense blocks alone."""


def tiny_family_config(model_type: str, /, **changes: Any) -> ModelConfig:
    return FAMILIES[model_type].config(**{**FAMILY_SIZES[model_type], **changes})


def tiny_family_model(model_type: str, /, *, seed: int = 0, **changes: Any) -> Decoder:
    """Make a model with norm weights other than 1 and biases other than 0, so that a forgotten one
    is noticed."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(tiny_family_config(model_type, **changes), generator)
    fresh = {name: p.clone() for name, p in model.named_parameters() if "norm" in name}
    for name, p in model.named_parameters():
        if "norm" in name:
            with torch.no_grad():
                p.uniform_(-0.5, 0.5, generator=generator).add_(fresh[name])
        elif name.endswith(("bias", "sinks", "conv1d.weight", "A_log")):
            nn.init.normal_(p, std=0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            nn.init.normal_(buffer, std=0.2, generator=generator)
    return model


def tiny_config(**changes: Any) -> DeepseekV2Config:
    return DeepseekV2Config(**{**SIZES, **changes})


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """Make a model with norm weights other than 1, so that a norm that forgot its weight is
    noticed."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(tiny_config(**changes), generator)
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5, generator=generator)
    return model.to(dtype)


def random_tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(
        SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers in fp64."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layout_of(x_BSD: Tensor) -> SequenceLayout:
    return SequenceLayout(x_BSD.shape[0], x_BSD.shape[1], x_BSD.device)


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters that are not frozen; each must have one."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in grads.values())
    return grads  # type: ignore[return-value]


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value (or to 1e-3, where zeros are
    expected)."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    if expected.numel() == 0:
        return 0.0
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def largest_error(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[float, str]:
    """The largest error and the name of the tensor that has it; both sides must have the same
    names."""
    assert actual.keys() == expected.keys()
    return max((error(actual[name], expected[name]), name) for name in expected)


def whole_part(model: Decoder) -> ModelPart:
    """Make a part of all of a model, with the model's own modules, in one stage."""
    num_layers = sum(block.mtp is None for block in model.layers)
    return ModelPart(model, PartLayers((range(num_layers),)))


def same_tensors(actual: nn.Module, expected: nn.Module) -> bool:
    first, second = actual.state_dict(), expected.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def deferring(model: nn.Module) -> WeightGradients:
    """Have the module put its weight gradients off; return the queue of them."""
    queue = WeightGradients()
    queue.deferring = True
    defer_weight_gradients(model, queue)
    return queue
