"""accelerate, on one process, two under DDP and two under FSDP2, against a plain loop."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integrations
accelerate = pytest.importorskip("accelerate")

import accelerate_soap as example
from accelerate.optimizer import AcceleratedOptimizer
from comparing import Weights, assert_same_bits, assert_same_training, muon, weights_of
from ranks import run_ranks

from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon

PLAIN = SimpleNamespace(prepare=lambda *things: things)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def plain_loop(factor: float, epochs: int = 1, parts: int = 1) -> Weights:
    """Train without accelerate; the gradients of `parts` parts of a batch are averaged, as between
    processes."""
    model, optimizer, data, schedule = example.make(PLAIN)
    schedule.base_lrs = [factor * lr for lr in schedule.base_lrs]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    for _ in range(epochs):
        for x, y in data:
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                ((model(a) - b).square().mean() / parts).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return weights_of(model)


def test_one_process_takes_the_steps_of_a_plain_loop_and_the_loss_falls() -> None:
    accelerator = example.make_accelerator()
    prepared = example.make(accelerator)
    losses = example.train_epoch(accelerator, *prepared)
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(prepared[1], AcceleratedOptimizer)
    assert [group["rule"] for group in prepared[1].param_groups] == ["soap", "adamw"]
    assert_same_training(weights_of(prepared[0]), plain_loop, 0.0)


def test_a_loaded_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    accelerator = example.make_accelerator()
    example.train_epoch(accelerator, *example.make(accelerator))
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    fresh = example.make(accelerator)
    accelerator.load_state(str(tmp_path))
    example.train_epoch(accelerator, *fresh)
    assert_same_training(weights_of(fresh[0]), lambda factor: plain_loop(factor, 2), 0.0)


def test_wrapping_keeps_functions_of_the_step_and_rules_of_groups() -> None:
    p, q, r = (nn.Parameter(torch.randn(6, 4)) for _ in range(3))
    every = lambda step: 2 if step < 5 else 4  # noqa: E731
    groups = [{"params": [p], "precondition_frequency": every}, {"params": [q], "rule": "muon"}]
    groups.append({"params": [r], "rule": "adamw", "lr": 1.0})
    optimizer = example.make_accelerator().prepare_optimizer(SOAP(groups, lr=1e-2))
    for one in (p, q, r):
        one.grad = torch.randn(6, 4)
    optimizer.step()
    assert optimizer.param_groups[0]["precondition_frequency"] is every
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2, 1.0]
    assert ["factor_0" in optimizer.state[one] for one in (p, q, r)] == [True, False, False]
    assert "momentum_buffer" in optimizer.state[q]


def test_a_scaler_skips_a_step_that_overflows() -> None:
    p = nn.Parameter(torch.ones(6, 4))
    example.make_accelerator()
    optimizer = AcceleratedOptimizer(
        Muon([p], lr=1e-2), scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    )
    for value, skipped in ((1.0, False), (torch.inf, True), (2.0, False)):
        before, step = (
            p.detach().clone(),
            int(optimizer.state[p]["step"]) if optimizer.state[p] else 0,
        )
        optimizer.scaler.scale((p * value).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped
        assert torch.equal(p, before) is skipped
        assert int(optimizer.state[p]["step"]) == step + (not skipped)


# --- two processes --------------------------------------------------------------------------------


def join(rank: int, num_ranks: int) -> Any:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    return example.make_accelerator()


def under_ddp(rank: int, num_ranks: int, folder: str) -> Weights:
    """Train two epochs, with a save and a load between them."""
    accelerator = join(rank, num_ranks)
    model, *others = example.make(accelerator)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    example.train_epoch(accelerator, model, *others)
    accelerator.save_state(folder)
    accelerator.free_memory()
    model, *others = example.make(accelerator)
    accelerator.load_state(folder)
    example.train_epoch(accelerator, model, *others)
    return weights_of(model.module)


def test_two_processes_under_ddp_are_one_process(tmp_path: Path) -> None:
    first, second = run_ranks(under_ddp, 2, str(tmp_path))
    assert_same_bits(first, second)
    assert_same_training(first, lambda factor: plain_loop(factor, epochs=2, parts=2), 0.0)


def fsdp2_on_cpu(accelerator: Any) -> None:
    """Do by hand what accelerate does to turn FSDP on, which it does for accelerators alone."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=100,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = (
        accelerate.DistributedType.FSDP,
        plugin,
    )


def under_fsdp2(rank: int, num_ranks: int) -> tuple[Weights, int]:
    """Return the weights after an epoch, and the elements of whole parameters that are still alive
    after the sharding."""
    accelerator, whole = join(rank, num_ranks), weakref.WeakSet()

    def noting(groups: Any, **options: Any) -> Muon:
        whole.update(p for group in groups for _, p in group["params"])
        return muon(groups, **options)

    example.SOAP = noting
    fsdp2_on_cpu(accelerator)
    model, *others = example.make(accelerator)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    gc.collect()
    kept = sum(p.numel() for p in whole)
    example.train_epoch(accelerator, model, *others)
    return weights_of(model), kept


def test_two_processes_under_fsdp2_are_one_process_and_nobody_keeps_whole_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(example, "SOAP", muon)
    (first, kept), (second, _) = run_ranks(under_fsdp2, 2)
    assert kept == 0
    assert_same_bits(first, second)
    assert_same_training(first, plain_loop, 5e-5)


def under_fsdp1(rank: int, num_ranks: int, originals: bool, rule: str) -> list[str]:
    """Return what happens to optimizers that are made before `prepare`, and after it."""
    accelerator = join(rank, num_ranks)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        auto_wrap_policy="size_based_wrap",
        min_num_params=100,
        use_orig_params=originals,
        sync_module_states=False,
    )
    assert plugin.fsdp_version == 1  # the default
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state, accelerate.PartialState()):  # one is made anew from the other
        state.distributed_type = accelerate.DistributedType.FSDP
        state.device = torch.device("cpu")  # not cpu:0, which FSDP1 takes for another device
    makers: dict[str, type[MatrixOptimizer]] = {"soap": SOAP, "adamw": AdamW}
    found = []
    for is_first in (True, False):
        model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        try:
            if is_first:
                optimizer = makers[rule](model.parameters(), lr=1e-2)
                model, optimizer = accelerator.prepare(model, optimizer)
            else:
                model = accelerator.prepare(model)
                optimizer = accelerator.prepare(makers[rule](model.parameters(), lr=1e-2))
            accelerator.backward(model(torch.ones(2, 16)).square().sum())
            optimizer.step()
            found.append("step")
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("originals", [True, False], ids=["originals", "flat"])
def test_fsdp1_is_refused_for_matrices_and_fine_for_adamw(originals: bool) -> None:
    for found in run_ranks(under_fsdp1, 2, originals, "soap"):
        # Without the originals an optimizer that was made first has no gradients: torch's neither.
        refused = found if originals else found[1:]
        for error in refused:
            assert "(FSDP1) has made, but soap needs whole matrices" in error
    for found in run_ranks(under_fsdp1, 2, originals, "adamw"):
        assert found == ["step", "step"]
