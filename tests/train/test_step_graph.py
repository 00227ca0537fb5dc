"""Steps whose passes are captured once and replayed, with a capture that runs on a CPU: it repeats
the same passes on the same tensors, and writes to where the captured results are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.engine.engine import Engine, build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.engine.step_graph import WARM_UP, StepGraph
from lather.errors import ConfigError
from lather.parallel.mesh import Mesh
from lather.pipeline.executor import StepOutput

CPU = torch.device("cpu")


class CapturingEngine:
    """An engine whose passes a graph runs, and counts of what was done."""

    def __init__(self, config: Config) -> None:
        self.engine: Engine = build_engine(config, Mesh.single(CPU))
        self.run = self.engine._executor.run
        parameters = self.engine.part.parameters()
        self.graph = StepGraph(self.run, parameters, self.capture)
        self.engine._graph = self.graph
        self.num_captures = self.num_replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        work()
        return self.replay

    def replay(self) -> None:
        self.num_replays += 1
        captured = self.graph._captured
        assert captured is not None
        output = self.run(captured.micro_batches)
        for old, new in zip(tensors(captured.output), tensors(output), strict=True):
            old.copy_(new)
        for parameter, gradient in captured.gradients:
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)
            parameter.grad = None


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


@pytest.mark.parametrize("schedule", ["sequential", "dualpipev"])
def test_replayed_steps_are_those_without_a_graph(
    make_config: Callable[..., Config], schedule: str
) -> None:
    config = make_config(parallel={"schedule": schedule}, train={"micro_batch_size": 1})
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


def test_other_batches_are_run_without_the_graph(make_config: Callable[..., Config]) -> None:
    config = make_config(train={"micro_batch_size": 1})
    captured = CapturingEngine(config)
    for seed in range(WARM_UP + 1):
        captured.engine.launch_gradients(batch(config, seed))
        captured.engine.parameters.clear_gradients()
    plain, length = batch(config, 0), config.train.sequence_length
    padded = replace(plain, padding_BS=torch.zeros(4, length, dtype=torch.bool))
    documents = replace(plain, begins_BS=torch.arange(length).expand(4, -1) % 9 == 0)
    for other in (padded, documents):
        captured.engine.launch_gradients(other)
        captured.engine.parameters.clear_gradients()
    captured.engine.launch_gradients(plain, with_logits=True)
    assert (captured.num_captures, captured.num_replays) == (1, 1)


def test_settings_with_which_passes_differ_are_refused(make_config: Callable[..., Config]) -> None:
    plain = make_config(train={"cuda_graph": True})
    check_parallel(plain, 1)
    other = make_config(train={"cuda_graph": True, "qk_clip": 100.0}, log={"timeline_every": 5})
    for config, ranks, with_what in (
        (plain, 2, "2 ranks"),
        (other, 1, r"train\.qk_clip and log\.timeline_every"),
    ):
        with pytest.raises(ConfigError, match=f"train.cuda_graph = true .* false with {with_what}"):
            check_parallel(config, ranks)
