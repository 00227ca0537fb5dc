"""An exponential average of the trained weights, on each rank of those that it has
(`train.average_timescale`).

With a time constant of T steps, the weights w_s of step s count in the average a_t after step t in
proportion to exp(-(t - s) / T), and these factors are divided by their sum:

    a_t = a_(t-1) + rate_t (w_t - a_(t-1))        rate_t = (1 - exp(-1 / T)) / (1 - exp(-t / T))

The rate of step 1 is 1, so the value before it does not count. The rate depends on the step alone:
there is nothing to store but the average. One that begins later in a run begins with the weights
that the run then has.

The averages are in fp32 (of fp64 weights in fp64) and have the shapes of the rank's parameters, 4
bytes for each trained weight. Weights in bf16 count with their remainders. Each element is averaged
by itself, so that the average does not depend on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lather.config.loop import LoopConfig
from lather.optim import MatrixOptimizer
from lather.optim.batched.remainders import exact_weight, set_weight
from lather.parallel.local_parameters import LocalParameters


class AveragedWeights:
    """The average of the trained parameters of a rank."""

    @torch.no_grad()
    def __init__(
        self, parameters: LocalParameters, optimizer: MatrixOptimizer, timescale: float
    ) -> None:
        """Begin with the weights as they are. `optimizer`: has the remainders of the weights;
        `timescale`: the time constant in steps."""
        self._entries, self._optimizer = parameters.trained(), optimizer
        self._timescale = timescale
        self.values: dict[Tensor, Tensor] = {}
        """The averages, by `LocalParameter.source`."""
        for entry in self._entries:
            p = entry.parameter.detach()
            dtype = torch.promote_types(p.dtype, torch.float32)
            self.values[entry.source] = torch.empty_like(p, dtype=dtype)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are."""
        for x, average in self._pairs():
            average.copy_(x)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Count in the weights after step 1, 2, ..."""
        rate = math.expm1(-1 / self._timescale) / math.expm1(-step / self._timescale)
        for x, average in self._pairs():
            average.lerp_(x.to(average.dtype), rate)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Have the averages as the weights, for a block that changes neither; afterwards both have
        the bits that they had before. No rank has both twice, except that averages are copied whose
        weights are rounded without a remainder."""
        rounded = [(a, a.clone()) for x, a in self._pairs() if x.dtype != a.dtype]
        self._swap()
        try:
            yield
        finally:
            self._swap()
            for average, before in rounded:
                average.copy_(before)

    @torch.no_grad()
    def _swap(self) -> None:
        for entry in self._entries:
            average = self.values[entry.source]
            state = self._optimizer.state.get(entry.source, {})
            x = exact_weight(entry.parameter, state).to(average.dtype, copy=True)
            set_weight(entry.parameter, average, state)
            average.copy_(x)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight, as exactly as it is known, with its average."""
        for entry in self._entries:
            state = self._optimizer.state.get(entry.source, {})
            yield exact_weight(entry.parameter, state), self.values[entry.source]


def averaged_weights(
    loop: LoopConfig, parameters: LocalParameters, optimizer: MatrixOptimizer
) -> AveragedWeights | None:
    """Return the average of a run's weights; None if it has none."""
    timescale = loop.average_timescale * loop.steps
    return AveragedWeights(parameters, optimizer, timescale) if timescale else None
