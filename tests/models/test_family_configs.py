"""The configurations of all families: every field refuses values that cannot be built, and says
what to change; fresh weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lather.errors import ConfigError
from lather.models.families import FAMILIES, build_model
from lather.models.families.gpt_oss import GptOssConfig
from lather.models.families.qwen3_moe import Qwen3MoeConfig
from lather.models.layers import RMSNorm
from models.tiny import (
    FAMILY_TABLES,
    SIZES,
    random_tokens,
    tiny_config,
    tiny_family_config,
    tiny_model,
)

OF_EACH_FAMILY = pytest.mark.parametrize("model_type", FAMILIES)


def assert_refused(model_type: str, name: str, value: Any, constraint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_family_config(model_type, **{name: value})
    assert str(raised.value).startswith(f"model.{name} = {value!r} ")
    assert constraint in str(raised.value)
    assert "\n" not in str(raised.value)


@OF_EACH_FAMILY
def test_a_number_out_of_range_is_refused_with_its_name_and_constraint(model_type: str) -> None:
    for field in dataclasses.fields(FAMILIES[model_type].config):
        least = int(field.name not in FAMILY_TABLES[model_type].may_be_zero)
        if field.name in FAMILY_TABLES[model_type].may_be_negative:
            continue
        if field.type in ("int", "int | None"):
            assert_refused(model_type, field.name, least - 1, f"at least {least}")
            assert_refused(model_type, field.name, -5, f"at least {least}")
        elif field.type == "float":
            above = "greater than 0" if least else "at least 0"
            for bad in (-1.0, math.nan, math.inf, *[0.0] * least):
                constraint = "finite" if bad == math.inf else above
                assert_refused(model_type, field.name, bad, constraint)


REFUSED: list[tuple[str, str, Any, str]] = [
    ("deepseek_v2", "qk_rope_head_dim", 5, "even"),
    ("deepseek_v2", "first_k_dense_replace", 4, "at most num_hidden_layers (3)"),
    ("deepseek_v2", "num_experts_per_tok", 6, "at most n_routed_experts (5)"),
    ("deepseek_v2", "n_group", 2, "a divisor of n_routed_experts (5)"),
    ("deepseek_v2", "topk_group", 2, "at most n_group (1)"),
    ("deepseek_v2", "topk_method", "noaux_tc", "one of 'greedy', 'group_limited_greedy'"),
    ("deepseek_v2", "model_type", "deepseek_v3", "'deepseek_v2'"),
    ("deepseek_v3", "topk_method", "greedy", "one of 'noaux_tc'"),
    ("deepseek_v3", "n_group", 5, "1, or at most 2, so that each group has 2 experts"),
    ("kimi_k2", "model_type", "deepseek_v3", "'kimi_k2'"),
    ("qwen3_moe", "head_dim", 5, "even"),
    ("qwen3_moe", "num_key_value_heads", 4, "a divisor of num_attention_heads (6)"),
    ("qwen3_moe", "num_experts_per_tok", 6, "at most num_experts (5)"),
    ("gpt_oss", "num_experts_per_tok", 6, "at most num_local_experts (5)"),
]


@pytest.mark.parametrize(("model_type", "name", "value", "constraint"), REFUSED)
def test_a_value_that_does_not_fit_another_is_refused(
    model_type: str, name: str, value: Any, constraint: str
) -> None:
    assert_refused(model_type, name, value, constraint)


def test_the_groups_in_reach_must_have_experts_enough() -> None:
    groups: dict[str, Any] = {"n_group": 5, "topk_group": 2, "num_experts_per_tok": 3}
    tiny_config(**groups)
    words = r"^model.num_experts_per_tok = 3 .* at most the 2 experts of topk_group groups"
    with pytest.raises(ConfigError, match=words):
        tiny_config(**groups, topk_method="group_limited_greedy")


@OF_EACH_FAMILY
@pytest.mark.parametrize("lowest", [1, 0])
def test_the_lowest_allowed_values_build_a_model_that_runs(model_type: str, lowest: int) -> None:
    fields = dataclasses.fields(FAMILIES[model_type].config)
    changes: dict[str, Any] = dict.fromkeys(FAMILY_TABLES[model_type].may_be_zero, 0)
    if lowest:
        changes = {field.name: 1 for field in fields if field.type in ("int", "int | None")}
        names = ("qk_rope_head_dim", "head_dim", "hidden_size")
        changes[next(name for name in names if name in changes)] = 2  # rotary pairs
        if "partial_rotary_factor" in {field.name for field in fields}:
            changes["partial_rotary_factor"] = 1.0
    model = build_model(tiny_family_config(model_type, **changes), torch.Generator())
    tokens = random_tokens(2, 3) % model.embed_tokens.num_embeddings
    assert model(tokens).logits_BSV.isfinite().all()


@OF_EACH_FAMILY
def test_fresh_weights(model_type: str) -> None:
    """Norms are 1 (zero-centered ones 0), biases 0, all else normal with the given deviation; the
    seed fixes every bit. (`test_delta_net.py` has A_log and dt_bias.)"""
    std = 0.02
    config = tiny_family_config(model_type, initializer_range=std)
    models = [build_model(config, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    first, again, other = (model.state_dict() for model in models)
    centered = {
        f"{name}.weight"
        for name, module in models[0].named_modules()
        if isinstance(module, RMSNorm) and module.zero_centered
    }
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if name.endswith(("A_log", "dt_bias")):
            continue
        if "norm" in name or name.endswith("bias"):
            is_zero = name.endswith("bias") or name in centered
            assert (weight == (0 if is_zero else 1)).all()
        else:
            mean, deviation, n = weight.mean().item(), weight.std().item(), weight.numel()
            assert not torch.equal(weight, other[name])
            assert mean == pytest.approx(0, abs=5 * std / math.sqrt(n)), name
            assert deviation == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name


@pytest.mark.parametrize("q_lora_rank", [None, 9])
@pytest.mark.parametrize(("dense", "shared", "tied"), [(0, 2, False), (1, 0, False), (3, 1, True)])
def test_parameter_count(q_lora_rank: int | None, dense: int, shared: int, tied: bool) -> None:
    d, heads, latent = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["kv_lora_rank"]
    query, rope, value = heads * (10 + 6), 6, heads * 7
    queries = d * query
    if q_lora_rank is not None:
        queries = d * q_lora_rank + q_lora_rank + q_lora_rank * query
    attention = queries + d * (latent + rope) + latent + latent * (heads * 10 + value) + value * d
    moe = 5 * d + (5 + shared) * 3 * d * 11
    blocks = 3 * (attention + 2 * d) + dense * 3 * d * 40 + (3 - dense) * moe
    model = tiny_model(
        q_lora_rank=q_lora_rank,
        first_k_dense_replace=dense,
        n_shared_experts=shared,
        tie_word_embeddings=tied,
    )
    embeddings = 37 * d * (1 if tied else 2)
    assert sum(p.numel() for p in model.parameters()) == embeddings + d + blocks
    for each in (model, model.double()):
        assert (each.lm_head.weight.data_ptr() == each.embed_tokens.weight.data_ptr()) == tied


def test_the_balance_loss_is_of_each_sequence_alone_if_asked() -> None:
    tokens = random_tokens(3, 9)
    alone = torch.stack([tiny_model()(row[None]).balance_loss() for row in tokens]).mean()
    assert torch.allclose(tiny_model(seq_aux=True)(tokens).balance_loss(), alone)
    assert not torch.allclose(tiny_model()(tokens).balance_loss(), alone)


def test_a_lone_expert_keeps_its_score_as_weight() -> None:
    """With a weight of 1 whatever the score is, the router would learn nothing."""
    assert tiny_config(norm_topk_prob=True, num_experts_per_tok=2).normalizes
    model = tiny_model(norm_topk_prob=True, num_experts_per_tok=1)
    assert (model(random_tokens(2, 5)).routings[0].weights_TK < 1).all()


def test_published_balance_coefficients_weigh_blocks_as_transformers_weighs_their_mean() -> None:
    """With an even load transformers' loss is K, whatever the number of blocks; ours is 1 for each
    block, summed."""
    sizes = {"num_experts_per_tok": 4, "num_hidden_layers": 6}
    qwen = Qwen3MoeConfig(**sizes, router_aux_loss_coef=0.3, mlp_only_layers=(1,))
    assert qwen.balance_loss_coef * 5 == pytest.approx(0.3 * 4)
    gpt_oss = GptOssConfig(**sizes, router_aux_loss_coef=0.9)
    assert gpt_oss.balance_loss_coef * 6 == pytest.approx(0.9 * 4)


def test_gpt_oss_has_a_kind_of_attention_for_each_layer_whatever_their_number() -> None:
    """A list that alternates counts as none. Every other list is kept, and has to have an entry for
    each layer."""
    sliding, full = "sliding_attention", "full_attention"
    alternating = tiny_family_config("gpt_oss", layer_types=(sliding, full, sliding))
    assert alternating == tiny_family_config("gpt_oss")
    fewer = dataclasses.replace(alternating, num_hidden_layers=2)
    assert fewer.attention_types == (sliding, full)
    other = tiny_family_config("gpt_oss", layer_types=(full, sliding, full))
    assert other.attention_types == other.layer_types == (full, sliding, full)  # type: ignore[union-attr]
    words = r"^model.layer_types has 3 entries, but model.num_hidden_layers is 2: give .* or leave"
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(other, num_hidden_layers=2)
    windows = [layer.self_attn.window for layer in build_model(alternating).layers]
    assert windows == [4, None, 4]
