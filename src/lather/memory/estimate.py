"""Estimates a rank's memory and work within seconds, from dry runs of a few layers that are
extrapolated to all. For searches; `plan` is exact.

Bytes and work grow linearly with the layers of a stage, so two numbers of layers suffice. The first
pipeline rank is run, which has embedding and head. Forward and backward passes are run separately
from the optimizer, since each depends on settings that do not affect the other; the results of dry
runs are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.optim import optim_config
from lather.errors import ConfigError
from lather.memory.dry_run import BUILDING, FIRST, PASSES, RankRun, dry_run
from lather.memory.ledger import KINDS
from lather.memory.plan import allowance_for
from lather.memory.work import REFRESH, Work
from lather.memory.workers import Assumed

Bytes = npt.NDArray[np.float64]
"""(kinds,): bytes of each of `KINDS`."""

IS_STATE = np.array([kind.startswith("optimizer") for kind in KINDS])
IS_ACTIVATION = np.array([kind == "activations" for kind in KINDS])


@dataclass(frozen=True)
class Estimate:
    """Memory and work of the first pipeline rank."""

    peak: Bytes
    allowance: float
    work: Work
    """Work of a step, including its share of a refresh."""

    @property
    def needed(self) -> float:
        return float(self.peak.sum()) + self.allowance


@dataclass(frozen=True)
class _Half:
    """One half of an estimate: the forward and backward passes, or the optimizer's step and the
    state that it leaves."""

    peak: Bytes
    building: Bytes
    state: Bytes
    rest: Work
    refresh: Work

    def scaled(self, own: _Half, base: _Half, kinds: npt.NDArray[np.bool_]) -> _Half:
        """Return a copy whose bytes of these kinds, and whose work, are multiplied by the ratios of
        `own` to `base`."""

        def bytes_(name: str) -> Bytes:
            mine, theirs, others = (np.asarray(getattr(half, name)) for half in (self, own, base))
            return np.where(kinds, mine * _ratio(theirs[kinds].sum(), others[kinds].sum()), mine)

        def work(name: str) -> Work:
            mine, theirs, others = (astuple(getattr(half, name)) for half in (self, own, base))
            return Work(
                *(one * _ratio(*ratio) for one, *ratio in zip(mine, theirs, others, strict=True))
            )

        return _Half(bytes_("peak"), self.building, bytes_("state"), work("rest"), work("refresh"))


class Estimator:
    """Estimates configurations that differ from `base` in mesh, kept activations and optimizer,
    with the processes of `pool`.

    Every mesh is run with the activations and the optimizer of `base`. How other activations, or
    another optimizer, change bytes and work is measured on one mesh, the first that is asked about,
    and assumed to be the same factor on all meshes.
    """

    def __init__(self, base: Config, assumed: Assumed, pool: ProcessPoolExecutor) -> None:
        self._asked, self._assumed, self._pool = base, assumed, pool
        self._first: tuple[ParallelConfig, int] | None = None
        self._known: dict[str, _Half | str] = {}

    def estimates(self, configs: Sequence[Config], world_size: int) -> list[Estimate | None]:
        """Return an estimate for each configuration; None if a dry run failed, for example because
        an operation refuses its sizes."""
        if self._first is None and configs:
            self._first = (configs[0].parallel, world_size)
        parts = [self._parts(config, world_size) for config in configs]
        new = {
            repr(part): part
            for several in parts
            for part in several
            if repr(part) not in self._known
        }
        jobs = {key: self._pool.submit(_half, self._assumed, *part) for key, part in new.items()}
        self._known |= {key: job.result() for key, job in jobs.items()}
        return [
            self._estimate(config, several) for config, several in zip(configs, parts, strict=True)
        ]

    @property
    def failures(self) -> list[str]:
        """Messages of the dry runs that failed."""
        return [half for half in self._known.values() if isinstance(half, str)]

    def _parts(self, config: Config, world_size: int) -> list[tuple[Config, int, str]]:
        """Return the dry runs of an estimate, for passes and for the optimizer: `base` on this
        mesh, `base` on the first mesh, and this configuration on the first mesh."""
        assert self._first is not None
        runs = (
            (self._asked, config.parallel, world_size),
            (self._asked, *self._first),
            (config, *self._first),
        )
        plain = replace(self._asked.train, recompute=(), micro_batch_size=0)
        passes = [
            (replace(like, parallel=mesh, optim=optim_config()), ranks, PASSES)
            for like, mesh, ranks in runs
        ]
        return passes + [
            (replace(like, parallel=mesh, moe=MoEConfig(), train=plain), ranks, FIRST)
            for like, mesh, ranks in runs
        ]

    def _estimate(
        self, config: Config, parts: Sequence[tuple[Config, int, str]]
    ) -> Estimate | None:
        halves = [half for part in parts if isinstance(half := self._known[repr(part)], _Half)]
        if len(halves) < len(parts):
            return None
        passes, base_passes, own_passes, optimizer, base_optimizer, own_optimizer = halves
        passes = passes.scaled(own_passes, base_passes, IS_ACTIVATION)
        optimizer = optimizer.scaled(own_optimizer, base_optimizer, IS_STATE)
        peak = max((passes.peak + optimizer.state, optimizer.peak, optimizer.building), key=np.sum)
        frequency = getattr(config.optim, "precondition_frequency", 1)
        work = passes.rest + optimizer.rest + optimizer.refresh * (1 / frequency)
        return Estimate(peak, allowance_for(float(peak.sum()), self._assumed.device), work)


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _half(assumed: Assumed, config: Config, world_size: int, name: str) -> _Half | str:
    """Run one half of an estimate in a process of its own; return the error's message if it cannot
    be run."""
    stages = 2 * config.parallel.pp if config.parallel.resolved_schedule == "dualpipev" else 1
    sizes = (1, 2) if stages > 1 else (2, 4)
    try:
        small, large = (
            dry_run(with_layers(config, size * stages), world_size, assumed, 0, do=(name,))
            for size in sizes
        )
    except (ConfigError, RuntimeError) as error:
        return str(error)
    layers = -(-config.model.num_hidden_layers // stages)
    factor = (layers - sizes[0]) / (sizes[1] - sizes[0])
    first, second = _summary(small, name), _summary(large, name)
    pairs = ((getattr(first, part.name), getattr(second, part.name)) for part in fields(_Half))
    return _Half(*(one + (one * -1.0 + other) * factor for one, other in pairs))


def _summary(run: RankRun, name: str) -> _Half:
    steps = [timeline for step, timeline in run.steps.items() if step.startswith(name)]
    peak, building = (
        one.curves[:, one.peak_time]
        for one in (max(steps, key=lambda one: one.peak), run.steps[BUILDING])
    )
    state = np.zeros_like(peak)
    if name == FIRST:
        state[IS_STATE] = steps[-1].curves[IS_STATE, -1]
        state[IS_STATE.argmax()] += run.missing_state  # plan for the owner with the largest state
    rest = sum((work for when, work in run.work.items() if when != REFRESH), Work())
    return _Half(peak, building, state, rest, run.work.get(REFRESH, Work()))


def with_layers(config: Config, number: int) -> Config:
    """Return the configuration with the first `number` layers only, one of them dense if the model
    has dense layers."""
    model: Any = config.model
    changes: dict[str, Any] = {"num_hidden_layers": number}
    for one in fields(model):
        value = getattr(model, one.name)
        if isinstance(value, tuple) and len(value) == model.num_hidden_layers:
            changes[one.name] = value[:number]
        elif one.name == "mlp_only_layers":
            changes[one.name] = tuple(layer for layer in value if layer < number)
        elif one.name == "first_k_dense_replace":
            changes[one.name] = min(value, 1)
    return replace(config, model=replace(model, **changes))
