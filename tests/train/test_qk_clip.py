"""QK-clip in training: attention logits that grow with Muon at a high rate stay near the threshold,
and a step without it has the bits of before."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lather.config.config import Config
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.engine.optimizer import build_optimizer
from lather.engine.qk_clip import check_qk_clip
from lather.engine.step import TrainStep
from lather.errors import ConfigError
from lather.models import attention_logits
from lather.models.attention_logits import largest_products, measured_layers
from lather.models.decoder import Decoder
from lather.models.families.qwen3_moe import Qwen3MoeConfig
from lather.models.lora import LoraConfig
from models.test_mtp import mtp_model
from models.tiny import random_tokens, tiny_family_model
from train.tiny_steps import state_bits, train_step

RATE = 0.1
THRESHOLDS = {"deepseek_v2": 2.0, "gpt_oss": 5.0}


def steps_of(
    family: str, *, qk_clip: float = 0.0, frozen: str = "none", **loop: Any
) -> tuple[Decoder, TrainStep]:
    """Return a model and its steps with Muon. Parameters with `frozen` in their names are not
    trained."""
    model = tiny_family_model(family, **({"q_lora_rank": 9} if family == "deepseek_v2" else {}))
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    optimizer = build_optimizer(optim_config("muon", lr=RATE), model.named_parameters())
    step = train_step(model, optimizer, **loop)
    step.qk_clip = qk_clip
    return model, step


def logits_of_steps(step: TrainStep, num_steps: int, lr: float = RATE) -> list[Tensor]:
    """Return the largest logits (layers, heads) in each of so many steps with the same batch."""
    batch = Batch.of_tokens(random_tokens(4, 17))
    logits = [step(batch, lr, with_logits=True).logits_AH for _ in range(num_steps)]
    return [logits_AH for logits_AH in logits if logits_AH is not None]


@pytest.mark.parametrize("family", THRESHOLDS)
def test_logits_that_grow_with_muon_stay_near_the_threshold(family: str) -> None:
    """They may exceed it by what they grow in one step."""
    threshold = THRESHOLDS[family]
    free = logits_of_steps(steps_of(family)[1], 30)
    clipped = logits_of_steps(steps_of(family, qk_clip=threshold)[1], 30)
    assert free[-1].max() > 6 * threshold
    assert max(logits_AH.max() for logits_AH in clipped) < 2 * threshold


@pytest.mark.parametrize("family", THRESHOLDS)
def test_heads_above_the_threshold_fall_to_it_and_no_other_head_changes(family: str) -> None:
    """Without an update of the weights, the logits of the first layer change by the clip alone."""
    _, step = steps_of(family)
    first, second = (logits_AH[0] for logits_AH in logits_of_steps(step, 2, lr=0.0))
    assert torch.equal(first, second)
    threshold = first.sort().values[-2:].mean().item()  # one head is above it
    _, step = steps_of(family, qk_clip=threshold)
    first, second = (logits_AH[0] for logits_AH in logits_of_steps(step, 2, lr=0.0))
    torch.testing.assert_close(second, first.clamp(max=threshold), rtol=1e-6, atol=0)
    assert (second != first).sum() == 1


def test_clipping_leaves_the_optimizer_s_state_as_it_is() -> None:
    (free, of_free), (clipped, of_clipped) = steps_of("gpt_oss"), steps_of("gpt_oss", qk_clip=0.01)
    for step in (of_free, of_clipped):
        logits_of_steps(step, 1)
    num_parameters = len(list(free.parameters())) + len(list(free.buffers()))
    bits = [state_bits(free, of_free.optimizer), state_bits(clipped, of_clipped.optimizer)]
    assert bits[0] != bits[1]
    assert bits[0][num_parameters:] == bits[1][num_parameters:] != []


def test_measuring_and_a_threshold_that_is_not_reached_change_no_bit() -> None:
    batch = Batch.of_tokens(random_tokens(4, 17))
    bits = []
    for qk_clip, with_logits in ((0.0, False), (0.0, True), (1e9, False)):
        model, step = steps_of("deepseek_v2", qk_clip=qk_clip)
        for _ in range(2):
            result = step(batch, RATE, with_logits=with_logits)
            assert (result.logits_AH is not None) == (with_logits or qk_clip > 0)
        bits.append(state_bits(model, step.optimizer))
    assert bits[0] == bits[1] == bits[2]


@pytest.mark.parametrize("recompute", [(), ("attention",)])
def test_each_micro_batch_is_measured_once(recompute: tuple[str, ...]) -> None:
    """Three layers and two micro-batches; validation is not measured."""
    model, step = steps_of("deepseek_v2", qk_clip=1.0, recompute=recompute, micro_batch_size=2)
    batch = Batch.of_tokens(random_tokens(4, 17))
    with patch.object(attention_logits, "largest_products", wraps=largest_products) as calls:
        logits_AH = step(batch, 0.0).logits_AH
        step.engine.validation_loss(batch)
    assert calls.call_count == 6
    assert all(layer.largest_H is None for layer in measured_layers(model).values())
    assert logits_AH is not None
    whole = steps_of("deepseek_v2")[1]
    torch.testing.assert_close(logits_AH, logits_of_steps(whole, 1)[0], rtol=1e-5, atol=0)


def test_a_layer_with_a_frozen_projection_is_left_as_it_is() -> None:
    model, step = steps_of("deepseek_v2", qk_clip=0.01, frozen="layers.1.self_attn.kv_b_proj")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits_of_steps(step, 1, lr=0.0)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    projections = ("q_b_proj", "kv_b_proj")
    assert changed == {
        f"layers.{i}.self_attn.{name}.weight" for i in (0, 2) for name in projections
    }


def test_a_model_that_normalizes_queries_and_keys_is_refused() -> None:
    check_qk_clip(Config(model=Qwen3MoeConfig()))
    check_qk_clip(Config(train=LoopConfig(qk_clip=100.0)))
    with pytest.raises(ConfigError) as error:
        check_qk_clip(Config(model=Qwen3MoeConfig(), train=LoopConfig(qk_clip=100.0)))
    assert str(error.value) == (
        "train.qk_clip = 100.0 is not valid: it must be 0 for qwen3_moe, which normalizes queries "
        "and keys: that bounds their logits whatever the projections are"
    )


def test_adapters_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Config(train=LoopConfig(qk_clip=100.0), lora=LoraConfig(rank=2), init_from="folder")
    assert str(error.value) == (
        "train.qk_clip = 100.0 is not valid: it must be 0 with adapters, whose base weights stay "
        "as they are"
    )


def test_depths_of_multi_token_prediction_are_clipped() -> None:
    model = mtp_model().float()
    optimizer = build_optimizer(optim_config("muon", lr=RATE), model.named_parameters())
    step = train_step(model, optimizer, recompute=("attention",))
    step.qk_clip = 0.01
    name, depth = list(measured_layers(model).items())[-1]
    before = depth.get_parameter("kv_b_proj.weight").detach().clone()
    logits_AH = step(Batch.of_tokens(random_tokens(4, 17)), 0.0).logits_AH
    assert name == "layers.4.self_attn"  # after three layers, the second of two depths
    assert logits_AH is not None
    assert (logits_AH > 0.01).all()
    assert not torch.equal(depth.get_parameter("kv_b_proj.weight"), before)
