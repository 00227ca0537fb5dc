"""The configuration of DeepSeek-V2: every field refuses values that cannot be built, and says what
to change; fresh weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lather.errors import ConfigError
from lather.models.families import build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from models.tiny import SIZES, random_tokens, tiny_config, tiny_model

AT_LEAST_ONE = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
]
POSITIVE = ["routed_scaling_factor", "rope_theta", "rms_norm_eps", "initializer_range"]
NOT_NEGATIVE = ["first_k_dense_replace", "n_shared_experts", "aux_loss_alpha"]
BAD: list[tuple[str, Any, str]] = [
    *((field, bad, "at least 1") for field in AT_LEAST_ONE for bad in (0, -1)),
    *((field, bad, "greater than 0") for field in POSITIVE for bad in (0.0, -1.0, math.nan)),
    *((field, -1, "at least 0") for field in NOT_NEGATIVE),
    ("aux_loss_alpha", math.nan, "at least 0"),
    ("qk_rope_head_dim", 5, "even"),
    ("first_k_dense_replace", 4, "at most num_hidden_layers (3)"),
    ("num_experts_per_tok", 6, "at most n_routed_experts (5)"),
    ("n_group", 2, "a divisor of n_routed_experts (5)"),
    ("topk_group", 2, "at most n_group (1)"),
    ("topk_method", "noaux_tc", "one of 'greedy', 'group_limited_greedy'"),
    ("model_type", "deepseek_v3", "'deepseek_v2'"),
]


@pytest.mark.parametrize(("field", "bad", "constraint"), BAD)
def test_a_bad_value_is_refused_with_its_name_and_constraint(
    field: str, bad: object, constraint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(**{field: bad})
    message = str(raised.value)
    assert message.startswith(f"model.{field} = {bad!r} ")
    assert constraint in message
    assert "\n" not in message


@pytest.mark.parametrize("field", [*POSITIVE, "aux_loss_alpha"])
def test_infinity_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.{field} = inf .* finite"):
        tiny_config(**{field: math.inf})


def test_every_field_that_can_be_bad_is_tried() -> None:
    tried = {field for field, _, _ in BAD}
    assert {
        field.name for field in dataclasses.fields(DeepseekV2Config) if field.type != "bool"
    } - {"rope_scaling"} == tried


def test_the_groups_in_reach_must_have_experts_enough() -> None:
    groups: dict[str, Any] = {"n_group": 5, "topk_group": 2, "num_experts_per_tok": 3}
    tiny_config(**groups)
    with pytest.raises(
        ConfigError,
        match=r"^model.num_experts_per_tok = 3 .* at most the 2 experts of topk_group groups",
    ):
        tiny_config(**groups, topk_method="group_limited_greedy")


@pytest.mark.parametrize(
    "changes",
    [
        dict.fromkeys((*AT_LEAST_ONE, "n_shared_experts"), 1) | {"qk_rope_head_dim": 2},
        dict.fromkeys(NOT_NEGATIVE, 0),
        {"q_lora_rank": None, "first_k_dense_replace": 3, "num_experts_per_tok": 5},
    ],
    ids=["ones", "zeros", "upper limits"],
)
def test_the_smallest_and_largest_allowed_values_build_a_model_that_runs(
    changes: dict[str, Any],
) -> None:
    model = build_model(tiny_config(**changes), torch.Generator().manual_seed(0))
    assert (
        model(random_tokens(2, 3) % model.embed_tokens.num_embeddings).logits_BSV.isfinite().all()
    )


def fresh(seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    return build_model(tiny_config(**changes), torch.Generator().manual_seed(seed)).state_dict()


def test_the_seed_fixes_every_bit_of_the_weights() -> None:
    first, again, other = fresh(), fresh(), fresh(seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == ("norm" in name) for name in first)


def test_norms_start_at_one_and_all_else_normal_with_the_given_deviation() -> None:
    std = 0.02
    for name, weight in fresh(initializer_range=std, q_lora_rank=9).items():
        if "norm" in name:
            assert (weight == 1).all()
        else:
            assert weight.mean().item() == pytest.approx(
                0, abs=5 * std / math.sqrt(weight.numel())
            ), name
            assert weight.std().item() == pytest.approx(
                std, rel=5 / math.sqrt(2 * weight.numel())
            ), name


@pytest.mark.parametrize("tied", [False, True])
def test_head_shares_its_storage_with_the_embedding_only_if_tied(tied: bool) -> None:
    model = build_model(tiny_config(tie_word_embeddings=tied), torch.Generator().manual_seed(0))
    for each in (model, model.double()):
        assert (each.lm_head.weight.data_ptr() == each.embed_tokens.weight.data_ptr()) == tied
    assert ("lm_head.weight" in dict(model.named_parameters())) != tied


@pytest.mark.parametrize("q_lora_rank", [None, 9])
@pytest.mark.parametrize(("dense", "shared", "tied"), [(0, 2, False), (1, 0, False), (3, 1, True)])
def test_parameter_count(q_lora_rank: int | None, dense: int, shared: int, tied: bool) -> None:
    config = tiny_config(
        q_lora_rank=q_lora_rank,
        first_k_dense_replace=dense,
        n_shared_experts=shared,
        tie_word_embeddings=tied,
    )
    d, heads, latent = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["kv_lora_rank"]
    query, rope, value = heads * (10 + 6), 6, heads * 7
    queries = (
        d * query if q_lora_rank is None else d * q_lora_rank + q_lora_rank + q_lora_rank * query
    )
    attention = queries + d * (latent + rope) + latent + latent * (heads * 10 + value) + value * d
    moe = 5 * d + (5 + shared) * 3 * d * 11
    expected = (
        37 * d * (1 if tied else 2)
        + d
        + 3 * (attention + 2 * d)
        + dense * 3 * d * 40
        + (3 - dense) * moe
    )
    model = build_model(config, torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in model.parameters()) == expected


def test_the_balance_loss_is_of_each_sequence_alone_if_asked() -> None:
    tokens = random_tokens(3, 9)
    alone = torch.stack([tiny_model()(row[None]).balance_loss() for row in tokens]).mean()
    assert torch.allclose(tiny_model(seq_aux=True)(tokens).balance_loss(), alone)
    assert not torch.allclose(tiny_model()(tokens).balance_loss(), alone)


def test_a_lone_expert_keeps_its_score_as_weight() -> None:
    """With a weight of 1 whatever the score is, the router would learn nothing."""
    assert tiny_config(norm_topk_prob=True, num_experts_per_tok=2).normalizes
    assert not tiny_config(norm_topk_prob=True, num_experts_per_tok=1).normalizes
    model = build_model(
        tiny_config(norm_topk_prob=True, num_experts_per_tok=1), torch.Generator().manual_seed(0)
    )
    weights_TK = model(random_tokens(2, 5)).routings[0].weights_TK
    assert (weights_TK < 1).all()
