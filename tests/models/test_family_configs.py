"""The families' configurations: every field refuses values that cannot be built; fresh weights."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lather.errors import ConfigError
from lather.models.families import FAMILIES, build_model
from lather.models.families.gpt_oss import GptOssConfig
from lather.models.families.qwen3_moe import Qwen3MoeConfig
from models.tiny import random_tokens, tiny_family_config

FAMILY_NAMES = list(FAMILIES)

AT_LEAST_ONE = {
    "qwen3_moe": [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "decoder_sparse_step",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    ],
    "gpt_oss": [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "sliding_window",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_local_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    ],
}


@pytest.mark.parametrize("model_type", AT_LEAST_ONE)
def test_the_smallest_allowed_values_build_a_model_that_runs(model_type: str) -> None:
    config = tiny_family_config(
        model_type, **dict.fromkeys(AT_LEAST_ONE[model_type], 1) | {"head_dim": 2}
    )
    model = build_model(config, torch.Generator().manual_seed(0))
    assert model(random_tokens(2, 3) % 1).logits_BSV.isfinite().all()


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_fresh_weights(model_type: str) -> None:
    """Norms are 1, biases 0, all else normal with the given deviation; the seed fixes every bit."""
    std = 0.02
    config = tiny_family_config(model_type, initializer_range=std)
    first, again = (
        build_model(config, torch.Generator().manual_seed(0)).state_dict() for _ in range(2)
    )
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if "norm" in name or name.endswith("bias"):
            assert (weight == (0 if name.endswith("bias") else 1)).all()
        else:
            assert weight.mean().item() == pytest.approx(
                0, abs=5 * std / math.sqrt(weight.numel())
            ), name
            assert weight.std().item() == pytest.approx(
                std, rel=5 / math.sqrt(2 * weight.numel())
            ), name


def test_published_balance_coefficients_weigh_blocks_as_transformers_weighs_their_mean() -> None:
    """With an even load transformers' loss is K, whatever the number of blocks; ours is 1 for each
    block, summed."""
    qwen = Qwen3MoeConfig(
        router_aux_loss_coef=0.3, num_experts_per_tok=4, num_hidden_layers=6, mlp_only_layers=(1,)
    )
    assert qwen.balance_loss_coef * 5 == pytest.approx(0.3 * 4)
    gpt_oss = GptOssConfig(router_aux_loss_coef=0.9, num_experts_per_tok=4, num_hidden_layers=6)
    assert gpt_oss.balance_loss_coef * 6 == pytest.approx(0.9 * 4)


def test_gpt_oss_has_a_kind_of_attention_for_each_layer_whatever_their_number() -> None:
    """A list that alternates counts as none. Every other list is kept, and has to have an entry for
    each layer."""
    explicit = tiny_family_config(
        "gpt_oss", layer_types=("sliding_attention", "full_attention", "sliding_attention")
    )
    assert explicit == tiny_family_config("gpt_oss")
    fewer = dataclasses.replace(explicit, num_hidden_layers=2)
    assert fewer.attention_types == ("sliding_attention", "full_attention")  # type: ignore[attr-defined]
    own = tiny_family_config(
        "gpt_oss", layer_types=("full_attention", "sliding_attention", "full_attention")
    )
    assert (
        own.attention_types
        == own.layer_types
        == ("full_attention", "sliding_attention", "full_attention")
    )  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError,
        match=(
            r"^model.layer_types has 3 entries, but "
            r"model.num_hidden_layers is 2: give .* or leave layer_types out"
        ),
    ):
        dataclasses.replace(own, num_hidden_layers=2)
