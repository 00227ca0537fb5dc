"""The place where a NaN began: found in forward and backward passes, in weights, and reported by a
run with its rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lather.config.config import Config
from lather.data.batches import Batch, Batches
from lather.engine.engine import Engine
from lather.engine.nan_search import NanOrigin, describe, search
from lather.engine.step import TrainStep
from lather.engine.step_reading import StepReading
from lather.files import read_rows
from lather.models.decoder import Decoder
from lather.optim import AdamW
from lather.train.display import PlainDisplay
from lather.train.loop import train
from tiny_run import last_weights
from train.tiny_steps import state_bits, train_step

MakeModel = Callable[..., Decoder]


@pytest.fixture
def step(make_model: MakeModel) -> TrainStep:
    model = make_model()
    return train_step(model, AdamW(model.parameters()), micro_batch_size=2)


def bend(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to what the module returns."""
    module.register_forward_hook(lambda module, args, output: function(output))


def finding(step: TrainStep, tokens: Callable[..., Tensor]) -> NanOrigin:
    """Take a step, which must change nothing, and search; a second search must find the same."""
    batch, model = Batch.of_tokens(tokens(0)), step.engine.part
    before = state_bits(model, step.optimizer)
    assert step(batch, 1e-2).skipped
    found = search(step.engine, batch)
    assert search(step.engine, batch) == found
    assert state_bits(model, step.optimizer) == before
    assert all(p.grad is None for p in model.parameters())
    return found


def test_a_nan_of_a_forward_pass(step: TrainStep, tokens: Callable[..., Tensor]) -> None:
    bend(step.engine.part.layers["1"].self_attn, lambda x: (x - 1e6).sqrt())
    found = finding(step, tokens)
    assert found.began
    assert found.text.startswith(
        "NaN began at sqrt.default in the forward pass of layers.1.self_attn"
    )


def test_an_overflow_is_named_before_the_nan_that_it_makes(
    step: TrainStep, tokens: Callable[..., Tensor]
) -> None:
    bend(step.engine.part.layers["0"].self_attn, lambda x: x.abs().add(1e30).square())
    text = finding(step, tokens).text
    overflow, nan, *_ = text.split("; ")
    assert overflow.startswith(
        "a value became infinite at pow.Tensor_Scalar in the forward pass of"
    )
    assert "layers.0.self_attn" in overflow
    assert nan.startswith("NaN began at ")


def test_a_nan_of_a_backward_pass(step: TrainStep, tokens: Callable[..., Tensor]) -> None:
    """The derivative of the root at 0 is infinite, and times 0 it is NaN."""
    bend(step.engine.part.layers["1"].self_attn, lambda x: x + (0 * x).abs().sqrt())
    text = finding(step, tokens).text
    assert "in the backward pass of layers.1.self_attn" in text
    assert "after it the gradients of " in text
    assert "the forward pass" not in text.split("; ")[0]


def test_a_weight_that_is_not_finite(step: TrainStep, tokens: Callable[..., Tensor]) -> None:
    with torch.no_grad():
        step.engine.part.layers["1"].input_layernorm.weight[3] = math.nan
    found = finding(step, tokens)
    assert found == NanOrigin("before the step layers.1.input_layernorm.weight is not finite", True)


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm"])
def test_in_bf16_an_overflow_of_a_norm(
    name: str, make_model: MakeModel, tokens: Callable[..., Tensor]
) -> None:
    """There norms write rounded rows, one of them with a branch added."""
    model = make_model()
    with torch.no_grad():
        model.layers[1].get_submodule(name).weight.fill_(3e38)
    step = train_step(model, AdamW(model.parameters()), micro_batch_size=2, precision="bf16")
    text = finding(step, tokens).text
    overflow = text.split("; ")[0]
    assert overflow.startswith("a value became infinite at ")
    assert overflow.endswith(f" in the forward pass of layers.1.{name}")


def test_finite_passes(step: TrainStep, tokens: Callable[..., Tensor]) -> None:
    found = search(step.engine, Batch.of_tokens(tokens(0)))
    assert found == NanOrigin("", began=False)
    assert describe([found])[0].startswith("all values are finite when the step runs again")


def test_ranks_to_which_a_nan_came_are_not_named() -> None:
    findings = [NanOrigin("came", False), NanOrigin("", False), NanOrigin("began", True)]
    assert describe(findings) == ["rank 2: began"]
    assert describe(findings[:2]) == ["rank 0: came"]


def test_a_run_names_the_layer_and_goes_on(
    make_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The experts of a layer make a NaN in every pass of the second step; the run is that without
    the search."""
    gradients, batch_of = Engine.launch_gradients, Batches.batch
    step = 0

    def batch(batches: Batches, number: int, *ranks: int) -> Batch:
        nonlocal step
        step = number
        return batch_of(batches, number, *ranks)

    def bent(engine: Engine, *args: Any, **options: Any) -> StepReading:
        experts = engine.part.layers["1"].mlp.shared_experts
        hook = experts.register_forward_hook(lambda module, args, x: x.log() if step == 2 else x)
        try:
            return gradients(engine, *args, **options)
        finally:
            hook.remove()

    options: dict[str, Any] = {"validation_every": 0, "average_timescale": 0.5}
    searching = make_config(debug={"nan": True}, train=options)
    plain = make_config(run_dir=str(tmp_path / "plain"), train=options)
    with patch.object(Engine, "launch_gradients", bent), patch.object(Batches, "batch", batch):
        for config in (searching, plain):
            train(config, PlainDisplay(1))
    expected = "rank 0: NaN began at log.default in the forward pass of layers.1.mlp.shared_experts"
    assert f"\n{expected}" in capsys.readouterr().out
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "suspect" in row]
    assert [row["step"] for row in rows] == [2]
    assert rows[0]["origin"][0].startswith(expected)
    assert rows[0]["suspect"] == "its loss or gradient is not finite"
    assert last_weights(tmp_path / "run") == last_weights(tmp_path / "plain")
