"""torchtitan's real Trainer on gloo, with a train spec whose optimizers are ours."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integrations
pytest.importorskip("torchtitan_on_cpu")  # this has to be imported before torchtitan
pytest.importorskip("torchtitan")

from comparing import Weights, assert_same_bits, assert_same_training, difference, weights_of
from ranks import run_ranks
from torch.distributed.tensor import DTensor, distribute_tensor

from lather.optim import SOAP, MatrixOptimizer

STEPS = 20
Trained = tuple[Weights, list[float]]


def train(rank: int, num_ranks: int, folder: str, rule: str = "muon") -> Trained:
    """Run the example under torchtitan's Trainer; returns weights and losses."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    example = _example()
    trainer = example.Trainer(example.make_config(folder, STEPS))
    set_weights(trainer.model_parts[0])
    losses: list[float] = []
    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    trainer.close()
    groups = trainer.optimizers.optimizers[0].param_groups
    assert [group["rule"] for group in groups] == [rule, "adamw"]
    assert all(group.get("precondition_frequency") in (None, every_third) for group in groups)
    return weights_of(trainer.model_parts[0]), losses


def every_third(step: int) -> int:
    return 3


def soap(groups: Any, momentum: float, **options: Any) -> MatrixOptimizer:
    """Make SOAP in place of Muon, with an interval that is a function."""
    return SOAP(groups, precondition_frequency=every_third, **options)


def train_soap(rank: int, num_ranks: int, folder: str) -> Trained:
    """Run the example with SOAP; returns weights and losses."""
    import torchtitan_muon

    torchtitan_muon.Muon = soap  # type: ignore[assignment, misc]
    return train(rank, num_ranks, folder, "soap")


def _example() -> Any:
    import torchtitan_muon

    logging.getLogger().setLevel(logging.WARNING)
    torchtitan_muon.register()
    return torchtitan_muon


@torch.no_grad()
def set_weights(model: torch.nn.Module) -> None:
    """Set the same weights on any number of ranks, which torchtitan does not do."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        whole = torch.randn(p.shape, generator=generator) * 0.1
        p.copy_(
            distribute_tensor(whole, p.device_mesh, p.placements)
            if isinstance(p, DTensor)
            else whole
        )


def plain_loop(rank: int, num_ranks: int, factor: float) -> Weights:
    os.environ["WORLD_SIZE"] = str(num_ranks)
    example = _example()
    from torchtitan.components.lr_scheduler import build_lr_schedulers

    config = example.make_config("")
    spec = example.get_train_spec()
    with torch.device("meta"):
        arguments = example.TransformerModelArgs(
            dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=32
        )
        arguments.update_from_config(config)
        model = spec.model_cls(arguments)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()  # this initializes the buffers
    set_weights(model)
    groups = example.parameter_groups(
        model, adam_names=("output",), rest_lr=3.2 * factor * config.optimizer.lr
    )
    optimizer = example.Muon(
        groups,
        lr=factor * config.optimizer.lr,
        momentum=0.9,
        weight_decay=config.optimizer.weight_decay,
    )
    (schedule,) = build_lr_schedulers([optimizer], config.lr_scheduler, STEPS)
    data = iter(example.Counting(1, 0, config))
    for _ in range(STEPS):
        inputs, labels = next(data)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(inputs["input"]).flatten(0, 1).float(), labels.flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return weights_of(model)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run_ranks(train, 1, str(tmp_path_factory.mktemp("alone")))[0]


def test_the_trainer_takes_the_steps_of_a_plain_loop_and_the_loss_falls(alone: Trained) -> None:
    weights, losses = alone
    assert losses[-1] < 0.75 * losses[0]
    assert_same_training(weights, lambda factor: run_ranks(plain_loop, 1, factor)[0], 2e-5)


def test_two_ranks_under_fsdp2_are_one_and_checkpoints_go_on_on_any_number(
    alone: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    first, second = run_ranks(train, 2, str(folder))
    assert_same_bits(first[0], second[0])
    assert difference(first[0], alone[0]) < 2e-5
    for num_ranks in (2, 1):
        copy = tmp_path / f"on {num_ranks}"
        shutil.copytree(
            folder / "checkpoint" / f"step-{STEPS // 2}", copy / "checkpoint" / f"step-{STEPS // 2}"
        )
        resumed, losses = run_ranks(train, num_ranks, str(copy))[0]
        assert len(losses) == STEPS // 2
        if num_ranks == 2:
            assert_same_bits(resumed, first[0])
        else:
            assert difference(resumed, alone[0]) < 2e-5


def test_checkpoints_of_an_optimizer_with_a_function_go_on(tmp_path: Path) -> None:
    """torchtitan flattens state dicts, which then have a key for every option."""
    whole, losses = run_ranks(train_soap, 2, str(tmp_path / "whole"))[0]
    assert len(losses) == STEPS
    checkpoint = Path("checkpoint", f"step-{STEPS // 2}")
    shutil.copytree(tmp_path / "whole" / checkpoint, tmp_path / "resumed" / checkpoint)
    for resumed, losses in run_ranks(train_soap, 2, str(tmp_path / "resumed")):
        assert len(losses) == STEPS // 2
        assert_same_bits(resumed, whole)


def experts(rank: int, num_ranks: int) -> list[tuple[str, int]]:
    from torchtitan.models.moe.moe import MoE, MoEArgs

    from lather.optim import parameters_by_kind

    with torch.device("meta"):
        model = torch.nn.ModuleDict({"layer": MoE(MoEArgs(num_experts=4), 16, 32)})
    return [
        (f"{kind} {name}", p.dim())
        for kind, found in parameters_by_kind(model).items()
        for name, p in found
    ]


def test_experts_of_torchtitan_are_found() -> None:
    found = run_ranks(experts, 1)[0]
    assert [one for one in found if one[0].startswith("experts")] == [
        (f"experts layer.experts.{name}", 3) for name in ("w1", "w2", "w3")
    ]
