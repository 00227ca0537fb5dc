"""DeepSeek-V2: logits, loss and every gradient against Hugging Face's implementation, with the same
weights.

Two options are not compared: `norm_topk_prob`, which transformers ignores (test_moe.py tests it),
and odd `kv_lora_rank`, which it cannot run.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from lather.models.rotary import YarnConfig
from models.tiny import error, largest_error, tiny_model

pytest.importorskip("transformers")
from models.twins import TOLERANCE, actual_results, expected_results

YARN = YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.3)
ALL_AT_ONCE: dict[str, Any] = {
    "q_lora_rank": 9,
    "first_k_dense_replace": 1,
    "n_shared_experts": 3,
    "n_routed_experts": 6,
    "topk_method": "group_limited_greedy",
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 3,
    "rope_theta": 50.0,
    "rope_scaling": YARN,
    "rms_norm_eps": 1e-2,
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 9},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 3},
        {"n_shared_experts": 0},
        {"n_shared_experts": 1},
        {"n_shared_experts": 3},
        {"routed_scaling_factor": 2.5},
        {"tie_word_embeddings": True},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 5},
        {"rope_theta": 50.0},
        {"rms_norm_eps": 1e-2},
        {"v_head_dim": 16},
        {"v_head_dim": 19},
        {"num_attention_heads": 1},
        {
            "n_routed_experts": 6,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 1,
        },
        {"n_routed_experts": 6, "topk_method": "greedy", "n_group": 3, "topk_group": 1},
        {"rope_theta": 50.0, "rope_scaling": YARN},
        {
            "rope_theta": 50.0,
            "rope_scaling": YarnConfig(4.0, 64, mscale=0.7, beta_fast=4.0, beta_slow=0.5),
        },
        {
            "rope_theta": 50.0,
            "rope_scaling": YarnConfig(
                4.0, 64, mscale_all_dim=0.7, truncate=False, beta_fast=4.0, beta_slow=0.5
            ),
        },
        {"rope_theta": 50.0, "rope_scaling": YarnConfig(4.0, 64, attention_factor=0.8)},
        {"seq_aux": True},
        ALL_AT_ONCE,
        {**ALL_AT_ONCE, "tie_word_embeddings": True, "first_k_dense_replace": 0},
    ],
    ids=str,
)
def test_logits_loss_and_every_gradient_are_those_of_transformers(changes: dict[str, Any]) -> None:
    expected = expected_results("deepseek_v2", changes)
    assert all(result.abs().max() > 1e-3 for result in expected.values())
    assert largest_error(actual_results(tiny_model(**changes)), expected) < (TOLERANCE, "")


@functools.cache
def expected_of_all_at_once() -> dict[str, Tensor]:
    return expected_results("deepseek_v2", ALL_AT_ONCE)


@pytest.mark.parametrize("name", [name for name, _ in tiny_model(**ALL_AT_ONCE).named_parameters()])
def test_tolerance_rejects_an_error_of_one_percent_in_one_weight(name: str) -> None:
    model = tiny_model(**ALL_AT_ONCE)
    weight = model.get_parameter(name).data.flatten()
    weight[weight.abs().argmax()] *= 1.01
    worst, _ = largest_error(actual_results(model), expected_of_all_at_once())
    assert worst > 10 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 51.0},
        {
            "rope_scaling": YarnConfig(
                4.04, 64, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.3
            )
        },
        {
            "rope_scaling": YarnConfig(
                4.0, 64, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.313
            )
        },
        {"topk_group": 3},
    ],
    ids=str,
)
def test_tolerance_rejects_a_field_that_is_a_little_off(change: dict[str, Any]) -> None:
    actual = actual_results(tiny_model(**{**ALL_AT_ONCE, **change}))
    assert error(actual["logits"], expected_of_all_at_once()["logits"]) > 10 * TOLERANCE
