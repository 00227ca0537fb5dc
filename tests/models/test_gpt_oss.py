"""GPT-OSS: logits, loss and every gradient against Hugging Face's implementation, with the same
weights; bf16 within its rounding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.models.rotary import YarnConfig
from models.tiny import error, largest_error, tiny_family_config, tiny_family_model

pytest.importorskip("transformers")
from models.twins import TOKENS, TOLERANCE, actual_results, expected_results, twin

YARN = YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5, truncate=False)
ALL_AT_ONCE: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "layer_types": ("full_attention", "sliding_attention", "sliding_attention"),
    "sliding_window": 3,
    "swiglu_alpha": 1.3,
    "rope_theta": 50.0,
    "rope_scaling": YARN,
    "rms_norm_eps": 1e-2,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 5},
        {"sliding_window": 1},
        {"sliding_window": 20},
        {"sliding_window": 21},
        {"sliding_window": 100},
        {"layer_types": ("full_attention",) * 3},
        {"layer_types": ("full_attention", "full_attention", "sliding_attention")},
        {"attention_bias": False},
        {"swiglu_limit": 0.01},
        {"swiglu_limit": 100.0, "swiglu_alpha": 0.5},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 2},
        {"rope_theta": 50.0, "rope_scaling": YARN},
        ALL_AT_ONCE,
    ],
    ids=str,
)
def test_logits_loss_and_every_gradient_are_those_of_transformers(changes: dict[str, Any]) -> None:
    expected = expected_results("gpt_oss", changes)
    assert largest_error(actual_results(tiny_family_model("gpt_oss", **changes)), expected) < (
        TOLERANCE,
        "",
    )


@functools.cache
def expected_of_all_at_once() -> dict[str, Tensor]:
    return expected_results("gpt_oss", ALL_AT_ONCE)


@pytest.mark.parametrize(
    "name", [name for name, _ in tiny_family_model("gpt_oss", **ALL_AT_ONCE).named_parameters()]
)
def test_tolerance_rejects_an_error_of_one_percent_in_one_weight(name: str) -> None:
    model = tiny_family_model("gpt_oss", **ALL_AT_ONCE)
    model.get_parameter(name).data.mul_(1.01)
    worst, _ = largest_error(actual_results(model), expected_of_all_at_once())
    assert worst > 10 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 51.0},
        {"swiglu_alpha": 1.313},
        {"swiglu_limit": 0.707},
        {"sliding_window": 4},
        {"rope_scaling": YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5, truncate=True)},
    ],
    ids=str,
)
def test_tolerance_rejects_a_field_that_is_a_little_off(change: dict[str, Any]) -> None:
    actual = actual_results(tiny_family_model("gpt_oss", **{**ALL_AT_ONCE, **change}))
    assert error(actual["logits"], expected_of_all_at_once()["logits"]) > 10 * TOLERANCE


@torch.no_grad()
def test_bf16_logits_are_as_near_the_fp32_ones_as_those_of_transformers_are() -> None:
    """Every token goes to all experts, so that rounding cannot change a choice."""
    changes = {**ALL_AT_ONCE, "num_experts_per_tok": 5}
    ours, exact = (tiny_family_model("gpt_oss", **changes) for _ in range(2))
    theirs = twin(ours, tiny_family_config("gpt_oss", **changes)).to(torch.bfloat16)
    expected = exact(TOKENS).logits_BSV
    errors = [
        (logits.float() - expected).square().mean().sqrt()
        for logits in (ours.bfloat16()(TOKENS).logits_BSV, theirs(TOKENS).logits)
    ]
    assert 1e-4 * expected.std() < errors[0] < 1.25 * errors[1]
    assert errors[0] < 0.02 * expected.std()
