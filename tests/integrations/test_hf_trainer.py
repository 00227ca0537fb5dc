"""The Hugging Face Trainer clips, schedules, groups and saves as a plain loop would."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integrations
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import hf_trainer_muon as example
from comparing import Weights, assert_same_bits, assert_same_training, weights_of

from lather.optim import SOAP, Muon, parameter_groups

STEPS = 8
QUIET = {
    "max_steps": STEPS,
    "save_steps": STEPS // 2,
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
}


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Weights:
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 4, STEPS)
    rows = torch.stack([row["input_ids"] for row in example.make_rows()])
    for step in range(STEPS):
        batch = rows[16 * step :][:16]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights_of(model)


def with_muon(factor: float) -> Weights:
    model = example.make_model()
    matrices, experts, rest = parameter_groups(model)
    rest |= {"lr": factor * 3.2e-2, "weight_decay": 0.0}
    return plain_loop(
        model, Muon([matrices, experts, rest], lr=factor * 1e-2, momentum=0.9, weight_decay=0.01)
    )


def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    trainer = example.make_trainer(str(tmp_path), **QUIET)
    trainer.train()
    assert_same_training(weights_of(trainer.model), with_muon, 2e-6)


def test_the_loss_falls_and_every_group_keeps_its_rule_and_its_share_of_the_rate(
    tmp_path: Path,
) -> None:
    trainer = example.make_trainer(
        str(tmp_path), **QUIET | {"max_steps": 40, "save_strategy": "no"}
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    groups = trainer.optimizer.param_groups
    assert [group["rule"] for group in groups] == ["muon", "muon", "adamw"]
    assert [group["matrix_layout"] for group in groups] == ["tensor", "per_expert", "tensor"]
    assert groups[2]["lr"] == pytest.approx(3.2 * groups[0]["lr"])
    assert trainer.lr_scheduler.get_last_lr() == [group["lr"] for group in groups]


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path: Path) -> None:
    whole = example.make_trainer(str(tmp_path), **QUIET)
    whole.train()
    checkpoint = f"{tmp_path}/checkpoint-{STEPS // 2}"
    second = example.make_trainer(str(tmp_path / "second"), checkpoint, **QUIET)
    second.train(resume_from_checkpoint=checkpoint)
    assert_same_bits(weights_of(whole.model), weights_of(second.model))
    assert_same_bits(whole.optimizer.state_dict(), second.optimizer.state_dict())


class Own(transformers.Trainer):
    """The Trainer with its own groups: one whose parameters decay, one whose do not."""


def own_trainer(folder: Path, checkpoint: str | None = None, **changes: Any) -> Own:
    arguments = example.make_trainer(str(folder), **QUIET).args
    for name, value in changes.items():
        setattr(arguments, name, value)
    options = {"lr": 5e-3, "precondition_frequency": 3}
    return Own(
        example.make_model(checkpoint),
        arguments,
        train_dataset=example.make_rows(),
        optimizer_cls_and_kwargs=(SOAP, options),
    )


def test_the_trainers_own_groups_for_weight_decay(tmp_path: Path) -> None:
    """The Trainer makes SOAP of them by `optimizer_cls_and_kwargs`; experts are then tensors of
    three dims, and norms are vectors."""
    trainer = own_trainer(tmp_path)
    trainer.train()

    def plain(factor: float) -> Weights:
        model = example.make_model()
        decaying = [p for name, p in model.named_parameters() if "norm" not in name]
        others = [p for name, p in model.named_parameters() if "norm" in name]
        groups = [
            {"params": decaying, "weight_decay": 0.01},
            {"params": others, "weight_decay": 0.0},
        ]
        return plain_loop(model, SOAP(groups, lr=factor * 5e-3, precondition_frequency=3))

    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.01, 0.0]
    assert_same_training(weights_of(trainer.model), plain, 2e-5)
    inner = trainer.optimizer.optimizer
    states = {name: inner.state[p].keys() for name, p in trainer.model.named_parameters()}
    assert "factor_0" in states["model.layers.0.self_attn.q_proj.weight"]
    assert states["model.norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}

    checkpoint = f"{tmp_path}/checkpoint-{STEPS // 2}"
    second = own_trainer(tmp_path / "second", checkpoint)
    second.train(resume_from_checkpoint=checkpoint)
    assert_same_bits(weights_of(trainer.model), weights_of(second.model))
