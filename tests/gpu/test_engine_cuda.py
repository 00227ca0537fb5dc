"""The engine on one GPU, in one process: the CPU's numbers, memory that does not grow, no waiting
for the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.device import CUBLAS_WORKSPACE, deterministic
from lather.engine.engine import Engine, build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.engine.step_reading import StepResult
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.parallel.expert_exchange import ExpertExchange
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import TimelineRecorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
if torch.cuda.is_available():  # `deterministic`, which later tests enter, would set it too late
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")

LENGTH, VOCABULARY, EXPERTS = 64, 512, 8
CPU = torch.device("cpu")
SCHEDULES = ("sequential", "dualpipev")


def config(schedule: str = "dualpipev", micro_batches: int = 4, **changes: Any) -> Config:
    model = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
    )
    poison = changes.pop("poison", False)
    loop = LoopConfig(
        batch_size=2 * micro_batches, micro_batch_size=2, sequence_length=LENGTH, **changes
    )
    return Config(
        model=model,
        train=loop,
        moe=MoEConfig(),
        parallel=ParallelConfig(schedule=schedule, poison=poison),
    )  # type: ignore[arg-type]


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def engine_on(device: torch.device, config: Config) -> Engine:
    return build_engine(config, Mesh.single(device))


def batch_of(config: Config, step: int = 0) -> Batch:
    shape = (config.train.batch_size, config.train.sequence_length + 1)
    return Batch.of_tokens(
        torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(step))
    )


def run(engine: Engine, batch: Batch) -> StepResult:
    """Run the forward and backward pass."""
    return engine.launch_gradients(batch).read()[0]


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {
        one.info.name: one.parameter.grad.detach().float().cpu()
        for one in engine.parameters
        if one.parameter.grad is not None
    }


def same_routing(reference: Engine, *others: Engine) -> None:
    """Make routers see large differences between experts, so that rounding does not turn a near-tie
    into another choice."""
    for engine in (reference, *others):
        with torch.no_grad():
            for router in engine.part.routers():
                router.weight.mul_(20)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": ("attention", "experts", "shared_experts")},
        {"poison": True},
        {"compile": True},
    ],
    ids=["plain", "recompute", "poison", "compile"],
)
def test_loss_and_gradients_are_the_cpus(schedule: str, changes: dict[str, Any]) -> None:
    on_cpu, on_gpu = (
        engine_on(CPU, config("sequential")),
        engine_on(cuda(), config(schedule, **changes)),
    )
    same_routing(on_cpu, on_gpu)
    batch = batch_of(config())
    expected, found = run(on_cpu, batch), run(on_gpu, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert torch.equal(found.counts_LE, expected.counts_LE)
    assert gradients(on_gpu).keys() == gradients(on_cpu).keys()
    for name, grad in gradients(on_cpu).items():
        assert (gradients(on_gpu)[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name
    assert on_gpu.validation_loss(batch) == pytest.approx(on_cpu.validation_loss(batch), rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_is_left_out_as_on_the_cpu(schedule: str) -> None:
    on_cpu, on_gpu = engine_on(CPU, config("sequential")), engine_on(cuda(), config(schedule))
    same_routing(on_cpu, on_gpu)
    batch = batch_of(config())
    lengths_B = torch.arange(len(batch.inputs_BS)) * LENGTH // len(batch.inputs_BS)
    padding_BS = torch.arange(LENGTH) >= lengths_B[:, None]
    labels_BS = batch.labels_BS.masked_fill(padding_BS, IGNORE_INDEX)
    batch = replace(batch, labels_BS=labels_BS, padding_BS=padding_BS)
    expected, found = run(on_cpu, batch), run(on_gpu, batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.balance_loss == pytest.approx(expected.balance_loss, rel=1e-5)
    assert torch.equal(found.counts_LE, expected.counts_LE)
    for name, grad in gradients(on_cpu).items():
        assert (gradients(on_gpu)[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bf16_is_fp32_within_rounding(schedule: str) -> None:
    on_cpu, on_gpu = engine_on(CPU, config()), engine_on(cuda(), config(schedule, precision="bf16"))
    same_routing(on_cpu, on_gpu)
    batch = batch_of(config())
    assert run(on_gpu, batch).loss == pytest.approx(run(on_cpu, batch).loss, rel=1e-2)
    total = sum(grad.square().sum() for grad in gradients(on_cpu).values())
    error = sum(
        (gradients(on_gpu)[name] - grad).square().sum() for name, grad in gradients(on_cpu).items()
    )
    assert error <= 0.1**2 * total


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_walk_does_not_wait_for_the_device(schedule: str) -> None:
    """One process needs no sizes of an exchange. In fp32, where grouped products have no kernel,
    the walk does wait."""
    engine = engine_on(cuda(), config(schedule, precision="bf16"))
    batch = batch_of(config())
    run(engine, batch)  # this compiles kernels
    engine.parameters.clear_gradients()
    number = engine.schedule.num_micro_batches
    micro_batches = engine.shares.micro_batches(batch, 1.0, [1 / number] * number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._executor.run(micro_batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peak_memory_does_not_grow_with_the_number_of_micro_batches(schedule: str) -> None:
    peaks = []
    for number in (4, 16):
        engine = engine_on(cuda(), config(schedule, number, precision="bf16"))
        batch = batch_of(config(schedule, number))
        run(engine, batch)
        engine.parameters.clear_gradients()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(engine, batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del engine
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize("name", ["adamw", "soap"])
def test_training_steps_lower_the_loss(name: str) -> None:
    trained = replace(config(precision="bf16"), optim=optim_config(name, lr=3e-3))
    engine = engine_on(cuda(), trained)
    step = TrainStep(engine, build_optimizer(trained.optim, engine.parameters), 1.0)
    losses = [step(batch_of(trained), 3e-3).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3


def test_a_timeline_has_the_times_of_the_device() -> None:
    recorder = TimelineRecorder(cuda())
    engine = build_engine(config(), Mesh.single(cuda()), record=recorder)
    run(engine, batch_of(config()))
    recorder.begin()
    run(engine, batch_of(config()))
    events = recorder.end()
    assert [event.action for event in events] == list(engine.schedule.ranks[0])
    assert all(event.end >= event.start for event in events)
    assert sum(event.end - event.start for event in events) > 0


@pytest.mark.parametrize("rounded_weights", ["step", "block"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_captured_steps_learn_what_launched_steps_do(schedule: str, rounded_weights: str) -> None:
    runs = []
    for cuda_graph in (False, True):
        settings = config(
            schedule, precision="bf16", cuda_graph=cuda_graph, rounded_weights=rounded_weights
        )
        engine = engine_on(cuda(), settings)
        step = TrainStep(engine, build_optimizer(settings.optim, engine.parameters), 1.0)
        batch = batch_of(settings)
        runs.append([step(batch, 1e-2) for _ in range(8)])
    assert engine._graph is not None
    assert engine._graph._captured is not None
    launched, captured = runs
    assert launched[-1].loss < launched[2].loss - 0.5
    for x, y in zip(captured, launched, strict=True):
        assert x.loss == pytest.approx(y.loss, rel=0.03)
        assert x.grad_norm == pytest.approx(y.grad_norm, rel=0.1)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exchange_over_nccl_changes_no_number(schedule: str, nccl: dist.ProcessGroup) -> None:
    """The only rank exchanges with itself, but through the all-to-alls, their stream and the early
    frees."""
    plain, exchanging = (engine_on(cuda(), config(schedule, poison=True)) for _ in range(2))
    free_buffer, sizes_group = exchanging._segments.frees.free_buffer, dist.new_group([0])
    exchanging._segments.exchange = ExpertExchange(
        nccl, EXPERTS, free_buffer=free_buffer, sizes_group=sizes_group
    )
    for step in range(3):
        batch = batch_of(config(), step)
        expected, found = run(plain, batch), run(exchanging, batch)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        for name, grad in gradients(plain).items():
            assert (gradients(exchanging)[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name
        plain.parameters.clear_gradients()
        exchanging.parameters.clear_gradients()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_gradients_have_the_same_bits_each_time(precision: str) -> None:
    found: list[list[Tensor]] = []
    for _ in range(2):
        with deterministic():
            engine = engine_on(cuda(), config(precision=precision))
            generator = torch.Generator().manual_seed(7)
            run(
                engine,
                Batch.of_tokens(torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)),
            )
        found.append([p.grad.clone() for p in engine.part.parameters() if p.grad is not None])
    assert len(found[0]) > 10
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_deterministic_steps_on_long_sequences_have_the_same_bits_each_time() -> None:
    """With 2,048 positions a query's gradient is a sum over many blocks of keys, whose order a fast
    kernel leaves to chance."""
    found: list[list[Tensor]] = []
    for _ in range(2):
        with deterministic():
            trained = replace(
                config(precision="bf16", micro_batches=4), optim=optim_config("adamw", lr=3e-3)
            )
            trained = replace(trained, train=replace(trained.train, sequence_length=2048))
            engine = engine_on(cuda(), trained)
            step = TrainStep(engine, build_optimizer(trained.optim, engine.parameters), 1.0)
            for number in range(2):
                step(batch_of(trained, number), 3e-3)
        found.append([p.detach().clone() for p in engine.part.parameters()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
