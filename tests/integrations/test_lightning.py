"""Lightning with its closure, its clipping and its checkpoints, on one process and on two under DDP
and under FSDP2."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integrations
lightning = pytest.importorskip("lightning")

import lightning_soap as example
from comparing import Weights, assert_same_bits, assert_same_training, muon, weights_of
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import run_ranks
from torch.utils.data import DataLoader, DistributedSampler

from lather.optim import SOAP, parameter_groups


def plain_loop(factor: float, parts: int = 1) -> Weights:
    """Train without Lightning; the gradients of `parts` parts of a batch are averaged, as between
    processes."""
    torch.manual_seed(0)
    module = example.Regression()
    groups = parameter_groups(module, rest_lr=factor * 3.2e-2)
    optimizer = example.SOAP(groups, lr=factor * 4e-3, weight_decay=0.01, precondition_frequency=5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, example.STEPS)
    for _ in range(2):
        for x, y in example.make_data():
            optimizer.zero_grad()
            for a, b in zip(in_parts(x, parts), in_parts(y, parts), strict=True):
                ((module.layers(a) - b).square().mean() / parts).backward()
            torch.nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], 1.0
            )
            optimizer.step()
            schedule.step()
    return weights_of(module)


def in_parts(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Deal rows in turn, as a DistributedSampler does."""
    return [x[part::parts] for part in range(parts)]


def test_the_trainer_takes_the_steps_of_a_plain_loop_and_the_loss_falls(tmp_path: Path) -> None:
    module = example.fit(str(tmp_path))
    assert module.losses[-1] < 0.5 * module.losses[0]
    assert_same_training(weights_of(module), plain_loop, 0.0)


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path: Path) -> None:
    whole = example.fit(str(tmp_path))
    second = example.fit(str(tmp_path), f"{tmp_path}/epoch=0.ckpt")
    assert second.losses == whole.losses[example.STEPS // 2 :]
    assert_same_bits(weights_of(whole), weights_of(second))
    assert_same_bits(
        whole.trainer.optimizers[0].state_dict(), second.trainer.optimizers[0].state_dict()
    )


class ByHand(example.Regression):
    """Uses manual optimization, in which Lightning's wrapper takes the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer, (x, y) = self.optimizers(), batch
        assert [group["rule"] for group in optimizer.param_groups] == ["soap", "adamw"]
        optimizer.zero_grad()
        self.manual_backward((self.layers(x) - y).square().mean())
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def test_the_wrapper_of_manual_optimization(tmp_path: Path) -> None:
    """The wrapper's class is made of ours, and has our state, our counters and our saved form."""
    torch.manual_seed(0)
    module = ByHand()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, **quiet).fit(
        module, example.make_data()
    )
    assert_same_training(weights_of(module), plain_loop, 0.0)
    wrapper, inner = module.optimizers(), module.trainer.optimizers[0]
    assert isinstance(wrapper, SOAP)
    assert wrapper is not inner
    assert wrapper.counters == inner.counters
    assert inner.counters["refreshes_done"] > 0
    assert_same_bits(wrapper.state_dict(), inner.state_dict())


# --- two processes --------------------------------------------------------------------------------


def join(rank: int, num_ranks: int) -> dict[str, Any]:
    """Make the options of a Trainer whose processes exist already."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    os.environ |= {name: str(value) for name, value in names.items()} | {
        "TORCHELASTIC_RUN_ID": "test"
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    rows = example.make_data().dataset
    # Lightning's own sampler shuffles
    sampler = DistributedSampler(rows, num_ranks, rank, shuffle=False)
    data = DataLoader(rows, batch_size=example.BATCH // num_ranks, sampler=sampler)
    own = {"data": data, "use_distributed_sampler": False}
    return {
        "accelerator": "cpu",
        "devices": num_ranks,
        "plugins": [TorchElasticEnvironment()],
        **own,
    }


def under_ddp(rank: int, num_ranks: int, folder: str) -> tuple[Weights, Weights]:
    """Return the weights of a whole run, and of one that was resumed."""
    whole = example.fit(folder, strategy="ddp", **join(rank, num_ranks))
    second = example.fit(folder, f"{folder}/epoch=0.ckpt", strategy="ddp", **join(rank, num_ranks))
    return weights_of(whole), weights_of(second)


def test_two_processes_under_ddp_are_one_process(tmp_path: Path) -> None:
    (first, resumed), (other, _) = run_ranks(under_ddp, 2, str(tmp_path))
    assert_same_bits(first, other)
    assert_same_bits(first, resumed)
    assert_same_training(first, lambda factor: plain_loop(factor, parts=2), 0.0)


class Sharded(example.Regression):
    def configure_model(self) -> None:
        for layer in [*self.layers, self.layers]:
            if list(layer.parameters()):
                torch.distributed.fsdp.fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def under_fsdp2(rank: int, num_ranks: int, folder: str) -> tuple[Weights, Weights]:
    example.Regression, example.SOAP = Sharded, muon
    runs = []
    for checkpoint in (None, f"{folder}/epoch=0.ckpt"):
        strategy = ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)
        module = example.fit(folder, checkpoint, strategy=strategy, **join(rank, num_ranks))
        assert all(hasattr(p, "full_tensor") for p in module.parameters())
        runs.append(weights_of(module))
    return runs[0], runs[1]


def test_two_processes_under_fsdp2_are_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "SOAP", muon)
    (first, resumed), (other, _) = run_ranks(under_fsdp2, 2, str(tmp_path))
    assert_same_bits(first, other)
    assert_same_bits(first, resumed)
    assert_same_training(first, plain_loop, 5e-5)
