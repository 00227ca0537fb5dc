"""Model flops of a token: weights that multiply it, and attention to what it sees."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lather.config.toml_file import load_config
from lather.models.families import FAMILIES, ModelConfig, build_model
from lather.models.model_flops import flops_per_token
from tiny_model import TINY

REPOSITORY = Path(__file__).parents[2]


def outline(config: ModelConfig) -> nn.Module:
    return build_model(config, None, torch.device("meta"))


def test_flops_of_a_token_are_counted_by_hand() -> None:
    """The sizes of benchmarks/gpu/small.toml: D 64, E 8, K 2, F 32, one dense and one MoE block, V
    500; and its MoE block alone."""
    config = load_config(REPOSITORY / "benchmarks/gpu/small.toml").model
    model = outline(config)
    attention = 64 * 2 * 24 + 64 * (16 + 8) + 16 * 2 * (16 + 16) + 2 * 16 * 64
    dense, expert, shared, router = 3 * 64 * 96, 3 * 64 * 32, 3 * 64 * 32, 64 * 8
    moe = attention + 2 * expert + shared + router
    parameters = attention + dense + moe + 500 * 64
    products_of_attention = 3 * 2 * 32 * (24 + 16)
    assert flops_per_token(model, config, 32) == 6 * parameters + 2 * products_of_attention
    assert flops_per_token(model.layers[1], config, 32, 1) == 6 * moe + products_of_attention


def flops_of(config: ModelConfig, length: int) -> float:
    return flops_per_token(outline(config), config, length)


def test_a_window_hides_tokens() -> None:
    """Flops beyond those of the weights are those of attention; of 4 layers 2 have a window."""
    small = {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16, "num_attention_heads": 4}
    config = FAMILIES["gpt_oss"].config(**small, sliding_window=8)
    per_token = 6 * 4 * 2 * 16
    weights = flops_of(config, 32) - per_token * (2 * 16 + 2 * (8 - 1))
    assert flops_of(config, 64) == weights + per_token * (2 * 32 + 2 * 7.5)
    assert flops_of(config, 8) == weights + per_token * 4 * 4


def test_linear_attention_sees_no_tokens() -> None:
    config = load_config(REPOSITORY / "configs/qwen3-next-80b-a3b.toml").model
    more = flops_of(config, 2048) - flops_of(config, 1024)
    assert more == pytest.approx(3 * 1024 * 16 * 2 * 256 * 12)  # of 48 layers 12


def test_weights_that_are_not_trained_take_two_thirds() -> None:
    config = FAMILIES["deepseek_v2"].config(**TINY)
    model = outline(config)
    attention = flops_per_token(nn.Module(), config, 32)
    whole = flops_per_token(model, config, 32) - attention
    model.requires_grad_(requires_grad=False)
    assert flops_per_token(model, config, 32) - attention == pytest.approx(whole * 2 / 3)


def test_a_depth_of_multi_token_prediction_has_a_block_and_the_head_again() -> None:
    config = FAMILIES["deepseek_v3"].config(**TINY)
    config, deeper = (replace(config, num_nextn_predict_layers=number) for number in (0, 1))
    added = sum(p.numel() for p in outline(deeper).parameters()) - sum(
        p.numel() for p in outline(config).parameters()
    )
    more = flops_of(deeper, 32) - flops_of(config, 32)
    assert more > 6 * config.vocab_size * config.hidden_size
    assert more < 6 * (added + config.vocab_size * config.hidden_size) + 6 * 16 * 1000
