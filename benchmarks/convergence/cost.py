"""Measures what the optimizers of a study cost: milliseconds of a step and of a gradient, and bytes
of state, on a machine that does nothing else.

The optimizers of a setting are alive together and take turns: in every round each does whole
intervals between refreshes, on gradients of real batches. A gradient is a forward and backward pass
of the setting's model, timed in the same rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.convergence.study import Row, Study
from benchmarks.measure import percentiles
from lather.config.config import Config
from lather.data.batches import Batch, Batches
from lather.data.opening import open_datasets, training_batches
from lather.engine.engine import Engine, build_engine
from lather.engine.optimizer import build_optimizer, head_rows
from lather.optim import MatrixOptimizer
from lather.parallel.mesh import Mesh

ROUNDS = 7
STEPS = 10
"""The least number of steps of a round, which has whole intervals."""
WARM_UP = 12


@dataclass
class _Timed:
    """An optimizer with its parameters."""

    name: str
    params: list[nn.Parameter]
    optimizer: MatrixOptimizer
    steps: int
    """The number of its steps in a round."""

    def seconds(self, gradients: list[list[Tensor]], steps: int) -> float:
        """Take steps; returns the mean seconds of a step."""
        total = 0.0
        for step in range(steps):
            for p, g in zip(self.params, gradients[step % len(gradients)], strict=True):
                p.grad = g
            start = time.perf_counter()
            self.optimizer.step()
            total += time.perf_counter() - start
        return total / steps


def measure(study: Study, folder: Path) -> Iterator[Row]:
    """Measure every contestant in every setting of the study; yields a row for each."""
    for setting in study.settings:
        configs = {
            contestant.name: study.trial(contestant, setting, 0, contestant.rates[setting]).config(
                folder
            )
            for where, contestant in study.pairs()
            if where == setting
        }
        if configs:
            yield from _measure_setting(setting, configs)


def _measure_setting(setting: str, configs: dict[str, Config]) -> Iterator[Row]:
    config = next(iter(configs.values()))
    engine = build_engine(config, Mesh.single(torch.device("cpu")))
    batch = _batches(config)
    gradients = [_gradients(engine, batch.batch(step)) for step in range(1, 5)]
    contestants = [_timed(name, config, engine) for name, config in configs.items()]
    for contestant in contestants:
        contestant.seconds(gradients, WARM_UP)
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    gradient_times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        _gradients(engine, batch.batch(number + 5))
        gradient_times.append(time.perf_counter() - start)
        turn = number % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            times[contestant.name].append(contestant.seconds(gradients, contestant.steps))
    for contestant in contestants:
        yield {
            "benchmark": "convergence-cost",
            "setting": setting,
            "contestant": contestant.name,
            "optimizer_ms": percentiles([1e3 * seconds for seconds in times[contestant.name]]),
            "gradient_ms": percentiles([1e3 * seconds for seconds in gradient_times]),
            "state_bytes": sum(
                x.numel() * x.element_size()
                for state in contestant.optimizer.state.values()
                for x in _tensors(state)
            ),
            "parameters": sum(p.numel() for p in contestant.params),
        }


def _batches(config: Config) -> Batches:
    datasets = open_datasets(config.data, config.model.vocab_size, lambda text: None)
    return training_batches(
        datasets, config.data, config.train.sequence_length, config.train.batch_sizes, config.seed
    )


def _gradients(engine: Engine, batch: Batch) -> list[Tensor]:
    """Compute the gradients of a batch. They are not clipped: only their time and their usual size
    matter."""
    engine.launch_gradients(batch).read()
    gradients = [p.grad.clone() for _, p in engine.parameters.spread() if p.grad is not None]
    engine.parameters.clear_gradients()
    return gradients


def _timed(name: str, config: Config, engine: Engine) -> _Timed:
    named = [(key, nn.Parameter(p.detach().clone())) for key, p in engine.parameters.spread()]
    optimizer = build_optimizer(config.optim, named, head_rows(config))
    assert isinstance(optimizer, MatrixOptimizer)
    frequencies = [group.get("precondition_frequency", 1) for group in optimizer.param_groups]
    every = math.lcm(*(frequency for frequency in frequencies if isinstance(frequency, int)))
    return _Timed(name, [p for _, p in named], optimizer, every * -(-STEPS // every))


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
