"""Steps whose passes are captured once and replayed, with a capture that runs on a CPU: a replay
computes the passes on the captured tensors, writes to where the captured results are, and changes
nothing else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from in_turn import in_turn
from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.engine.engine import Engine, build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.engine.step_graph import WARM_UP, StepGraph, cuda_graph
from lather.errors import ConfigError, UserError
from lather.parallel.mesh import Mesh
from lather.pipeline.executor import StepOutput

CPU = torch.device("cpu")


class CapturingEngine:
    """An engine whose passes a graph runs, and counts of what was done."""

    def __init__(self, config: Config) -> None:
        self.engine: Engine = build_engine(config, Mesh.single(CPU))
        parameters = self.engine.part.parameters()
        self.graph = StepGraph(self.engine._passes, parameters, self.capture)
        self.engine._graph = self.graph
        self.num_captures = self.num_replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work, as a capture does: its Python runs once; and forget what it computed."""
        self.num_captures += 1
        work()
        return self.replay

    def replay(self) -> None:
        """Write other numbers into the captured tensors, and leave everything of Python as it
        is."""
        self.num_replays += 1
        captured = self.graph._captured
        assert captured is not None
        sharded = [x for unit in self.engine.units.values() for x in unit.sharded]
        before = [dict(vars(x)) for x in sharded]
        output = self.engine._passes(captured.micro_batches)
        for old, new in zip(tensors(captured.output), tensors(output), strict=True):
            old.copy_(new)
        for parameter, gradient in captured.gradients:
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)
        for parameter in self.engine.part.parameters():
            parameter.grad = None
        for x, state in zip(sharded, before, strict=True):
            vars(x).update(state)


def tensors(output: StepOutput) -> list[torch.Tensor]:
    summaries = [each for of_chunk in output.routings.values() for each in of_chunk]
    return [*output.losses, *(x for each in summaries for x in (each.count_E, each.balance_loss))]


def batch(config: Config, seed: int) -> Batch:
    """Return a batch; every second one lacks some labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.train.batch_size, config.train.sequence_length + 1)
    made = Batch.of_tokens(torch.randint(config.model.vocab_size, shape, generator=generator))
    if seed % 2:
        made.labels_BS[0, : seed + 1] = IGNORE_INDEX
    return made


@pytest.mark.parametrize(
    ("settings", "schedule"),
    in_turn(
        [
            {},
            {"precision": "bf16"},
            {"precision": "bf16", "rounded_weights": "block"},
            {"precision": "bf16", "weight_dtype": "bfloat16", "frozen": ("embed_tokens.*",)},
        ],
        ["sequential", "dualpipev"],
    ),
    ids=str,
)
def test_replayed_steps_are_those_without_a_graph(
    make_config: Callable[..., Config], schedule: str, settings: dict[str, Any]
) -> None:
    config = make_config(parallel={"schedule": schedule}, train={"micro_batch_size": 1} | settings)
    plain, captured = build_engine(config, Mesh.single(CPU)), CapturingEngine(config)
    steps = [
        TrainStep(engine, build_optimizer(config.optim, engine.parameters), 1.0)
        for engine in (plain, captured.engine)
    ]
    for seed in range(6):
        expected, found = (step(batch(config, seed), 1e-2) for step in steps)
        assert found.loss == expected.loss
        assert found.grad_norm == expected.grad_norm
        assert found.counts_LE.equal(expected.counts_LE)
    for x, y in zip(plain.part.parameters(), captured.engine.part.parameters(), strict=True):
        assert x.equal(y)
    assert (captured.num_captures, captured.num_replays) == (1, 6 - WARM_UP)


@pytest.mark.parametrize("kind", ["padding", "documents", "logits"])
def test_other_passes_run_without_the_graph_which_is_released(
    make_config: Callable[..., Config], kind: str
) -> None:
    """A graph keeps the memory of its passes, which those of other kinds need."""
    config = make_config(train={"micro_batch_size": 1})
    captured = CapturingEngine(config)
    for seed in range(WARM_UP + 1):
        captured.engine.launch_gradients(batch(config, seed))
        captured.engine.parameters.clear_gradients()
    assert captured.graph._captured is not None
    plain, length = batch(config, 0), config.train.sequence_length
    changes: dict[str, dict[str, Any]] = {
        "padding": {"padding_BS": torch.zeros(4, length, dtype=torch.bool)},
        "documents": {"begins_BS": torch.arange(length).expand(4, -1) % 9 == 0},
        "logits": {},
    }
    other = replace(plain, **changes[kind])
    captured.engine.launch_gradients(other, with_logits=kind == "logits")
    captured.engine.parameters.clear_gradients()
    assert captured.graph._captured is None
    assert (captured.num_captures, captured.num_replays) == (1, 1)
    captured.engine.launch_gradients(plain)
    assert (captured.num_captures, captured.num_replays) == (2, 2)


OBSTACLES: dict[str, dict[str, Any]] = {
    "moe.memory 'reference'": {"moe": {"memory": "reference"}},
    "data.packed_attention": {"data": {"packed_attention": True}},
    "data.packing 'documents'": {"data": {"packing": "documents"}},
    "train.first_batch_size": {"train": {"first_batch_size": 2, "batch_growth_steps": 4}},
    "train.gradient_dtype 'bfloat16'": {"train": {"gradient_dtype": "bfloat16"}},
    "train.offload_frozen": {"train": {"offload_frozen": True}},
    "train.qk_clip": {"train": {"qk_clip": 100.0}},
    "log.attention_logits_every and log.timeline_every": {
        "log": {"attention_logits_every": 5, "timeline_every": 5}
    },
    "train.precision 'fp32', whose experts wait for sizes": {"train": {"precision": "fp32"}},
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_settings_with_which_passes_differ_or_wait_are_refused(
    make_config: Callable[..., Config], name: str
) -> None:
    sections = OBSTACLES[name]
    train = {"cuda_graph": True, "precision": "bf16"} | sections.get("train", {})
    config = make_config(**sections | {"train": train})
    with pytest.raises(ConfigError, match=re.escape(f"it must be false with {name}: change")):
        check_parallel(config, 1)


def test_a_graph_is_for_one_rank(make_config: Callable[..., Config]) -> None:
    config = make_config(train={"cuda_graph": True, "precision": "bf16"})
    check_parallel(config, 1)
    with pytest.raises(ConfigError, match="false with --world 2: change"):
        check_parallel(config, 2, "--world")


def test_a_wait_in_a_capture_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    with pytest.raises(UserError, match=r"so leave it out \(operation not permitted"):
        cuda_graph(fail)
