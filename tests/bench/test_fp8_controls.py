"""The controls of trainings with experts in FP8: what they round, what they leave alone, and the
agreement of routing that runs log."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.convergence.fp8_controls import agreement, choices, expert_scales, experts_in_bf16
from benchmarks.convergence.study import Study, Trial, load_study
from benchmarks.convergence.training import Silent, perform
from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.errors import ConfigError
from lather.files import read_rows
from lather.kernels.block_scaled import empty_rows, scaled_rows, scaled_weights
from lather.kernels.swiglu import SWIGLU, gate_backward, gate_forward, scaled_gate_forward
from lather.models.experts import Experts
from lather.train.loop import train
from lather.train.requests import RunRequests
from lather.train.validation import Validation
from models.test_fp8_experts import Case, errors
from models.test_rounded import engine_of
from models.tiny import random_tokens
from tiny_run import CONFIG, write_config

CONTESTANTS = """\
name = "fp8"
seeds = [1]
[settings.small]
[contestants.muon]
optim = { name = "muon" }
rates = { small = [1e-2, 2e-2] }
[contestants.block]
optim = { name = "muon" }
train = { fp8 = "block" }
rates = { small = [1e-2, 2e-2] }
[contestants.tensor]
optim = { name = "muon" }
train = { fp8 = "block" }
scales = "tensor"
rates = { small = [1e-2, 2e-2] }
[contestants.unscaled]
optim = { name = "muon" }
train = { fp8 = "block" }
scales = "none"
rates = { small = [1e-2, 2e-2] }
"""


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows with an outlier, and the weights of two experts of different sizes."""
    generator = torch.Generator().manual_seed(0)
    x_RN = torch.randn(5, 200, generator=generator)
    x_RN[2, 150] = 1000.0
    weight_EOI = (
        torch.randn(2, 130, 200, generator=generator) * torch.tensor([0.02, 3])[:, None, None]
    )
    return x_RN, weight_EOI


def test_the_control_with_one_scale_divides_all_elements_by_it() -> None:
    x_RN, weight_EOI = tensors()
    with expert_scales("tensor"):
        rows, weights = scaled_rows(x_RN), scaled_weights(weight_EOI)
    scale = x_RN.abs().max() / 448
    assert rows.scales.equal(scale.expand(5, 2))
    assert rows.values.float().equal((x_RN / scale).to(torch.float8_e4m3fn).float())
    for expert, weight_OI in enumerate(weight_EOI.bfloat16().float()):
        scale = weight_OI.abs().max() / 448
        assert weights.scales[expert].equal(scale.expand(2, 2))
        expected_OI = (weight_OI / scale).to(torch.float8_e4m3fn)
        assert weights.values[expert].float().equal(expected_OI.float())


def test_the_control_without_scales_rounds_elements_as_they_are() -> None:
    x_RN, weight_EOI = tensors()
    x_RN[0, 0], x_RN[0, 1] = 1e-4, -1e-4
    with expert_scales("none"):
        rows, weights = scaled_rows(x_RN), scaled_weights(weight_EOI)
    values_RN = rows.values.float()
    assert (rows.scales == 1).all()
    assert (weights.scales == 1).all()
    assert values_RN[2, 150] == 448
    assert not values_RN[0, :2].any()
    ordinary = x_RN.abs() < 448
    assert values_RN[ordinary].equal(x_RN[ordinary].to(torch.float8_e4m3fn).float())
    expected_EOI = weight_EOI.bfloat16().to(torch.float8_e4m3fn)
    assert weights.values.float().equal(expected_EOI.float())


@pytest.mark.parametrize("name", ["tensor", "none"])
def test_rows_that_the_gate_computes_have_the_scales_of_the_control(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up, grad = torch.randn(6, 2 * 130, generator=generator), torch.randn(6, 130)
    factor = torch.rand(6, generator=generator)
    with expert_scales(name):
        forward = scaled_gate_forward(gate_up, SWIGLU)
        backward = empty_rows(gate_up, gate_up.shape[1])
        grad_gate_up = gate_backward(grad, gate_up, SWIGLU, factor, backward)[0]
        pairs = [
            (forward, scaled_rows(gate_forward(gate_up, SWIGLU))),
            (backward, scaled_rows(grad_gate_up)),
        ]
    for found, expected in pairs:
        assert len(found.scales.unique()) == 1
        assert found.scales.equal(expected.scales)
        assert found.values.float().equal(expected.values.float())


def test_products_of_a_control_are_those_of_its_values() -> None:
    case = Case()
    with expert_scales("none"):
        control, expected = case.results(case.run()), case.expected()
    found = errors(control, expected)
    assert found.pop("x") < 0.02
    assert max(found.values()) < 0.006
    assert errors(case.results(case.run()), expected)["y"] > 0.015


def test_experts_have_their_bits_again_after_a_control() -> None:
    case = Case()
    before = case.results(case.run())
    with expert_scales("tensor"):
        control = case.results(case.run())
    with pytest.raises(RuntimeError), expert_scales("tensor"):
        raise RuntimeError
    after = case.results(case.run())
    assert all(after[name].equal(x) for name, x in before.items())
    assert not control["y"].equal(before["y"])
    with expert_scales("block"):
        assert case.run().equal(before["y"])


def test_the_agreement_is_the_share_of_choices_that_both_make() -> None:
    """The order of choices does not count, nor do micro-batches; -1 is padding."""
    chosen = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [-1, -1]])]
    assert agreement(chosen, [torch.tensor([[1, 0], [3, 2], [4, 5], [-1, -1]])]) == 1
    other = [torch.tensor([[1, 2], [2, 3]]), torch.tensor([[0, 1], [-1, -1]])]
    assert agreement(chosen, other) == pytest.approx(3 / 6)


def test_choices_of_experts_with_the_same_weights() -> None:
    """Equal paths agree in all choices; without scales some tokens go elsewhere, after the first
    layer, which no expert is before."""
    engine = engine_of("qwen3_moe", "step")
    for module in engine.part.modules():
        if isinstance(module, Experts):
            module.in_fp8 = True
    batch = Batch.of_tokens(random_tokens(4, 7, seed=3))

    def run(scales: str = "block") -> list[list[torch.Tensor]]:
        with expert_scales(scales):
            return choices(lambda: engine.validation_loss(batch), engine)[1]

    in_fp8 = run()
    with experts_in_bf16(engine):
        in_bf16 = run()
    assert [agreement(*pair) for pair in zip(in_fp8, run(), strict=True)] == [1.0] * len(in_fp8)
    unscaled = [agreement(*pair) for pair in zip(run("none"), in_bf16, strict=True)]
    assert unscaled[0] == 1
    assert min(unscaled) < 1


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("fp8")
    return load_study(write_study(folder))


def write_study(folder: Path) -> Path:
    write_config(folder)
    text = CONFIG.format(
        corpus=folder / "corpus", cache=folder / "data", steps=6, checkpoint_every=9
    )
    text = text.replace("precondition_frequency = 3\n", "").replace('name = "soap"\n', "")
    text = text.replace("num_hidden_layers = 2", "num_hidden_layers = 3")
    text = text.replace("[train]\n", '[train]\nprecision = "bf16"\n')
    for section in ("model", "data", "optim", "train", "checkpoint", "log"):
        text = text.replace(f"[{section}]", f"[config.{section}]")
    path = folder / "study.toml"
    path.write_text(CONTESTANTS + text)
    return path


@pytest.fixture(scope="module")
def rows(study: Study, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    trials = study.wanted({})
    assert len({trial.key for trial in trials}) == len(trials) == 4
    return {
        trial.contestant: perform(trial, folder / trial.contestant, lambda: False)
        for trial in trials
    }


def trial_of(study: Study, name: str) -> Trial:
    return next(trial for trial in study.wanted({}) if trial.contestant == name)


def test_every_validation_of_a_run_in_fp8_has_its_agreement_with_bf16(rows: dict[str, Any]) -> None:
    assert not rows["muon"].keys() & {"routing_agreement", "bf16_validation"}
    for name in ("block", "tensor", "unscaled"):
        row = rows[name]
        steps = [step for step, _ in row["validation"]]
        assert [step for step, _ in row["routing_agreement"]] == steps == [0, 5, 6]
        assert [step for step, _ in row["bf16_validation"]] == steps
        for _, share_L in row["routing_agreement"]:
            assert len(share_L) == 2
            assert all(0.5 < share <= 1 for share in share_L)
    assert rows["block"]["bf16_validation"][0] == rows["muon"]["validation"][0]
    assert rows["unscaled"]["bf16_validation"][-1] != rows["unscaled"]["validation"][-1]


def test_controls_are_other_runs(rows: dict[str, Any]) -> None:
    for one, other in itertools.combinations(rows.values(), 2):
        assert one["training"] != other["training"]


def test_the_log_changes_no_number_and_is_gone_after_the_run(
    study: Study, rows: dict[str, Any], tmp_path: Path
) -> None:
    assert Engine.validation_loss.__module__ == "lather.engine.engine"
    assert Validation.run.__module__ == "lather.train.validation"
    config = trial_of(study, "block").config(tmp_path)
    train(config, Silent(), RunRequests(lambda: False))
    plain = read_rows(tmp_path / "metrics.jsonl")
    losses = [round(row["validation_loss"], 5) for row in plain if "validation_loss" in row]
    assert losses == [loss for _, loss in rows["block"]["validation"]]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('scales = "row"', "scales = 'row' is not valid: it must be one of block, tensor, none"),
        ('scales = "none"', "must be left out, or the contestant must have train.fp8"),
    ],
)
def test_scales_that_no_run_could_have(line: str, error: str, tmp_path: Path) -> None:
    path = write_study(tmp_path)
    path.write_text(path.read_text().replace("[contestants.muon]", f"[contestants.muon]\n{line}"))
    with pytest.raises(ConfigError, match=error):
        load_study(path)
