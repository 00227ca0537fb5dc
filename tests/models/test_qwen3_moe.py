"""Qwen3-MoE: logits, loss and every gradient against Hugging Face's implementation, with the same
weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from lather.models.rotary import YarnConfig
from models.tiny import error, largest_error, tiny_family_model

pytest.importorskip("transformers")
from models.twins import TOLERANCE, actual_results, expected_results

YARN = YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5)
ALL_AT_ONCE: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "mlp_only_layers": (1,),
    "attention_bias": True,
    "rope_theta": 50.0,
    "rope_scaling": YARN,
    "rms_norm_eps": 1e-2,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts_per_tok": 5},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 4},
        {"mlp_only_layers": (0, 2)},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
        {"rope_theta": 50.0, "rope_scaling": YARN},
        ALL_AT_ONCE,
    ],
    ids=str,
)
def test_logits_loss_and_every_gradient_are_those_of_transformers(changes: dict[str, Any]) -> None:
    expected = expected_results("qwen3_moe", changes)
    assert largest_error(actual_results(tiny_family_model("qwen3_moe", **changes)), expected) < (
        TOLERANCE,
        "",
    )


@functools.cache
def expected_of_all_at_once() -> dict[str, Tensor]:
    return expected_results("qwen3_moe", ALL_AT_ONCE)


@pytest.mark.parametrize(
    "name", [name for name, _ in tiny_family_model("qwen3_moe", **ALL_AT_ONCE).named_parameters()]
)
def test_tolerance_rejects_an_error_of_one_percent_in_one_weight(name: str) -> None:
    model = tiny_family_model("qwen3_moe", **ALL_AT_ONCE)
    model.get_parameter(name).data.mul_(1.01)
    worst, _ = largest_error(actual_results(model), expected_of_all_at_once())
    assert worst > 10 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 51.0}, {"rope_scaling": YarnConfig(4.04, 64, beta_fast=4.0, beta_slow=0.5)}],
    ids=str,
)
def test_tolerance_rejects_a_field_that_is_a_little_off(change: dict[str, Any]) -> None:
    actual = actual_results(tiny_family_model("qwen3_moe", **{**ALL_AT_ONCE, **change}))
    assert error(actual["logits"], expected_of_all_at_once()["logits"]) > 10 * TOLERANCE
