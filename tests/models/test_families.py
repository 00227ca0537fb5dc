"""Every family: logits, loss and every gradient against Hugging Face's implementation, with the
same weights.

Two options of DeepSeek-V2 are not compared: `norm_topk_prob`, which transformers ignores
(test_moe.py tests it), and odd `kv_lora_rank`, which it cannot run.
"""

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

FULL, SLIDING = "full_attention", "sliding_attention"
BOUNDS = {"beta_fast": 4.0, "beta_slow": 0.5}
YARN = {
    "deepseek_v2": YarnConfig(4.0, 64, **BOUNDS, mscale=0.7, mscale_all_dim=1.3),
    "qwen3_moe": YarnConfig(4.0, 64, **BOUNDS),
    "gpt_oss": YarnConfig(4.0, 64, **BOUNDS, truncate=False),
}
GROUPS = {"n_routed_experts": 6, "topk_method": "group_limited_greedy", "n_group": 3}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **{"q_lora_rank": 9, "first_k_dense_replace": 1, "n_shared_experts": 3, **GROUPS},
        **{"topk_group": 2, "routed_scaling_factor": 2.5},
    },
    "qwen3_moe": {"mlp_only_layers": (1,), "attention_bias": True},
    "gpt_oss": {
        **{"layer_types": (FULL, SLIDING, SLIDING), "sliding_window": 3, "swiglu_alpha": 1.3}
    },
}
ALL_AT_ONCE = {
    family: {
        **options,
        **{"num_experts_per_tok": 3, "rope_theta": 50.0, "rms_norm_eps": 1e-2},
        "rope_scaling": YARN[family],
    }
    for family, options in OWN.items()
}


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_theta": 50.0, "rope_scaling": YarnConfig(4.0, 64, **BOUNDS, **changes)}


CHANGES: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [
        {"q_lora_rank": 9},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 3},
        {"n_shared_experts": 0},
        {"n_shared_experts": 1},
        {"n_shared_experts": 3},
        {"routed_scaling_factor": 2.5},
        {"num_experts_per_tok": 1},
        {"v_head_dim": 16},
        {"v_head_dim": 19},
        {"num_attention_heads": 1},
        {**GROUPS, "topk_group": 1},
        {**GROUPS, "topk_group": 1, "topk_method": "greedy"},
        yarn(mscale=0.7),
        yarn(mscale_all_dim=0.7, truncate=False),
        yarn(attention_factor=0.8),
        {"seq_aux": True},
        {
            **ALL_AT_ONCE["deepseek_v2"],
            **{"tie_word_embeddings": True, "first_k_dense_replace": 0},
        },
    ],
    "qwen3_moe": [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 4},
        {"mlp_only_layers": (0, 2)},
        {"attention_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
    ],
    "gpt_oss": [
        {"num_experts_per_tok": 1},
        *({"sliding_window": window} for window in (1, 20, 21, 100)),
        {"layer_types": (FULL,) * 3},
        {"layer_types": (FULL, FULL, SLIDING)},
        {"attention_bias": False},
        {"swiglu_limit": 0.01},
        {"swiglu_limit": 100.0, "swiglu_alpha": 0.5},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 2},
    ],
}
COMMON: list[dict[str, Any]] = [
    {},
    {"num_experts_per_tok": 5},
    {"tie_word_embeddings": True},
    {"rope_theta": 50.0},
    {"rms_norm_eps": 1e-2},
]
CASES = [
    (family, changes)
    for family, of_family in CHANGES.items()
    for changes in (*COMMON, *of_family, ALL_AT_ONCE[family])
]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    family: str, changes: dict[str, Any]
) -> None:
    expected = expected_results(family, changes)
    nonzero = {name for name, result in expected.items() if result.abs().max() > 1e-4}
    assert all(name in nonzero or ".gate." in name for name in expected)  # a lone expert's gate
    actual = actual_results(tiny_family_model(family, **changes))
    assert largest_error(actual, expected) < (TOLERANCE, "")


@functools.cache
def expected_of_all_at_once(family: str) -> dict[str, Tensor]:
    return expected_results(family, ALL_AT_ONCE[family])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family, changes in ALL_AT_ONCE.items()
        for name, _ in tiny_family_model(family, **changes).named_parameters()
    ],
)
def test_tolerance_rejects_an_error_of_one_percent_in_one_weight(family: str, name: str) -> None:
    model = tiny_family_model(family, **ALL_AT_ONCE[family])
    model.get_parameter(name).data.flatten()[::2].mul_(1.01)  # a norm would hide a common factor
    worst, _ = largest_error(actual_results(model), expected_of_all_at_once(family))
    assert worst > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((family, {"rope_theta": 51.0}) for family in YARN),
        *((family, {"rope_scaling": YarnConfig(4.04, 64, **BOUNDS)}) for family in YARN),
        ("deepseek_v2", yarn(mscale=0.7, mscale_all_dim=1.313)),
        ("deepseek_v2", {"topk_group": 3}),
        ("gpt_oss", {"swiglu_alpha": 1.313}),
        ("gpt_oss", {"swiglu_limit": 0.707}),
        ("gpt_oss", {"sliding_window": 4}),
        ("gpt_oss", yarn(truncate=True)),
    ],
    ids=str,
)
def test_tolerance_rejects_a_field_that_is_a_little_off(
    family: str, change: dict[str, Any]
) -> None:
    actual = actual_results(tiny_family_model(family, **{**ALL_AT_ONCE[family], **change}))
    expected = expected_of_all_at_once(family)
    assert error(actual["logits"], expected["logits"]) > 10 * TOLERANCE


@torch.no_grad()
def test_bf16_logits_are_as_near_the_fp32_ones_as_those_of_transformers_are() -> None:
    """Every token goes to all experts, so that rounding cannot change a choice."""
    changes = {**ALL_AT_ONCE["gpt_oss"], "num_experts_per_tok": 5}
    ours, exact = (tiny_family_model("gpt_oss", **changes) for _ in range(2))
    theirs = twin(ours, tiny_family_config("gpt_oss", **changes)).to(torch.bfloat16)
    expected = exact(TOKENS).logits_BSV
    errors = [
        (logits.float() - expected).square().mean().sqrt()
        for logits in (ours.bfloat16()(TOKENS).logits_BSV, theirs(TOKENS).logits)
    ]
    assert 1e-4 * expected.std() < errors[0] < 1.25 * errors[1]
    assert errors[0] < 0.02 * expected.std()
