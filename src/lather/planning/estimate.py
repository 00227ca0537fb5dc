"""Estimates a rank's memory and work within seconds, from dry runs of a few layers that are extrapolated to all. For searches; `plan` is
exact.

Bytes and work grow linearly with the layers of a stage, so two numbers of layers suffice. The first pipeline rank is run, which has
embedding and head. Forward and backward passes are run separately from the optimizer, since each depends on settings that do not affect the
other; the results of dry runs are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.optim import optim_config
from lather.errors import ConfigError
from lather.planning.dry_run import BUILDING, FIRST, PASSES, RankRun
from lather.planning.ledger import KINDS
from lather.planning.plan import allowance_for
from lather.planning.work import REFRESH, Work
from lather.planning.workers import Assumed, Device, dry_run, worker_processes

WORK = tuple(one.name for one in fields(Work))
STATE = tuple(kind for kind in KINDS if kind.startswith("optimizer"))


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind."""

    kinds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.kinds.values())

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes({kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0) for kind in {**self.kinds, **other.kinds}})

    def __mul__(self, factor: float) -> Bytes:
        return Bytes({kind: size * factor for kind, size in self.kinds.items()})


@dataclass(frozen=True)
class Estimate:
    """Memory and work of the first pipeline rank."""

    peak: Bytes
    allowance: float
    work: Work
    """Work of a step, including its share of a refresh."""

    @property
    def needed(self) -> float:
        return self.peak.total + self.allowance


@dataclass(frozen=True)
class _Half:
    """One half of an estimate: the forward and backward passes, or the optimizer's step and the state that it leaves."""

    peak: Bytes
    building: Bytes
    state: Bytes
    rest: Work
    refresh: Work

    def scaled(self, own: _Half, base: _Half, kinds: Sequence[str]) -> _Half:
        """Return a copy whose bytes of these kinds, and whose work, are multiplied by the ratios of `own` to `base`."""

        def bytes_(of: Callable[[_Half], Bytes]) -> Bytes:
            mine, theirs, others = (of(half).kinds for half in (self, own, base))
            factor = _ratio(sum(theirs.get(kind, 0.0) for kind in kinds), sum(others.get(kind, 0.0) for kind in kinds))
            return Bytes({kind: size * (factor if kind in kinds else 1.0) for kind, size in mine.items()})

        def work(of: Callable[[_Half], Work]) -> Work:
            mine, theirs, others = of(self), of(own), of(base)
            return Work(*(getattr(mine, name) * _ratio(getattr(theirs, name), getattr(others, name)) for name in WORK))

        peak, state = bytes_(lambda half: half.peak), bytes_(lambda half: half.state)
        return _Half(peak, self.building, state, work(lambda half: half.rest), work(lambda half: half.refresh))


class Estimator:
    """Estimates configurations that differ from `base` in mesh, kept activations and optimizer. A context manager, since it has processes.

    Every mesh is run with the activations and the optimizer of `base`. How other activations, or another optimizer, change bytes and work
    is measured on one mesh, the first that is asked about, and assumed to be the same factor on all meshes.
    """

    def __init__(self, base: Config, device: Device = "gpu", *, imbalance: float = 1.0, memory: int | None = None) -> None:
        self._asked, self._device = base, device
        self._first: tuple[Config, int] | None = None
        self._run = partial(_half, assumed=Assumed(device, imbalance, memory))
        self._known: dict[tuple[str, int, str], _Half | str] = {}

    def __enter__(self) -> Self:
        self._pool = worker_processes()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def estimates(self, configs: Sequence[Config], world_size: int) -> list[Estimate | None]:
        """Return an estimate for each configuration; None if a dry run failed, for example because an operation refuses its sizes."""
        if self._first is None and configs:
            self._first = (configs[0], world_size)
        wanted = {self._key(*part): part for config in configs for part in self._parts(config, world_size)}
        jobs = {key: self._pool.submit(self._run, *part) for key, part in wanted.items() if key not in self._known}
        self._known |= {key: job.result() for key, job in jobs.items()}
        return [self._estimate(config, world_size) for config in configs]

    @property
    def failures(self) -> list[str]:
        """Messages of the dry runs that failed."""
        return [half for half in self._known.values() if isinstance(half, str)]

    def _parts(self, config: Config, world_size: int) -> tuple[tuple[Config, int, str], ...]:
        """Return the dry runs of an estimate, for passes and for the optimizer: `base` on this mesh, `base` on the first mesh, and this
        configuration on the first mesh."""
        assert self._first is not None
        mesh, (first, first_world) = config.parallel, self._first

        def passes(like: Config, mesh: ParallelConfig, world_size: int) -> tuple[Config, int, str]:
            return replace(like, parallel=mesh, optim=optim_config()), world_size, PASSES

        def optimizer(like: Config, mesh: ParallelConfig, world_size: int) -> tuple[Config, int, str]:
            plain = replace(self._asked.train, recompute=(), micro_batch_size=0)
            return replace(like, parallel=mesh, moe=MoEConfig(), train=plain), world_size, FIRST

        return tuple(
            half(like, where, ranks)
            for half in (passes, optimizer)
            for like, where, ranks in (
                (self._asked, mesh, world_size),
                (self._asked, first.parallel, first_world),
                (config, first.parallel, first_world),
            )
        )

    @staticmethod
    def _key(config: Config, world_size: int, name: str) -> tuple[str, int, str]:
        return repr(config), world_size, name

    def _estimate(self, config: Config, world_size: int) -> Estimate | None:
        halves = [self._known[self._key(*part)] for part in self._parts(config, world_size)]
        if any(isinstance(half, str) for half in halves):
            return None
        passes, base_passes, own_passes, optimizer, base_optimizer, own_optimizer = (half for half in halves if isinstance(half, _Half))
        passes = passes.scaled(own_passes, base_passes, ("activations",))
        optimizer = optimizer.scaled(own_optimizer, base_optimizer, STATE)
        peaks = (passes.peak + optimizer.state, optimizer.peak, optimizer.building)
        peak = max(peaks, key=lambda peak: peak.total)
        frequency = getattr(config.optim, "precondition_frequency", 1)
        work = passes.rest + optimizer.rest + optimizer.refresh * (1 / frequency)
        return Estimate(peak, allowance_for(peak.total, self._device), work)


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _half(config: Config, world_size: int, name: str, *, assumed: Assumed) -> _Half | str:
    """Run one half of an estimate in a process of its own; return the error's message if it cannot be run."""
    stages = 2 * config.parallel.pp if config.parallel.resolved_schedule == "dualpipev" else 1
    sizes = (1, 2) if stages > 1 else (2, 4)
    try:
        small, large = (dry_run(with_layers(config, size * stages), world_size, assumed, 0, do=(name,)) for size in sizes)
    except (ConfigError, RuntimeError) as error:
        return str(error)
    layers = -(-config.model.num_hidden_layers // stages)
    factor = (layers - sizes[0]) / (sizes[1] - sizes[0])
    first, second = _summary(small, name), _summary(large, name)
    pairs = ((getattr(first, part.name), getattr(second, part.name)) for part in fields(_Half))
    return _Half(*(one + (one * -1.0 + other) * factor for one, other in pairs))


def _summary(run: RankRun, name: str) -> _Half:
    steps = [timeline for step, timeline in run.steps.items() if step.startswith(name)]
    timeline = max(steps, key=lambda timeline: timeline.peak)
    last = steps[-1].at(-1)
    state = {kind: float(last.get(kind, 0)) for kind in STATE}
    most = max(run.state_bytes.values(), default=0) - run.state_bytes.get(run.rank, 0)
    state[STATE[0]] += most  # plan for the owner with the largest state
    building = run.steps[BUILDING]
    rest = sum((work for when, work in run.work.items() if when != REFRESH), Work())
    return _Half(
        Bytes(dict(timeline.at(timeline.peak_time))),
        Bytes(dict(building.at(building.peak_time))),
        Bytes(state if name == FIRST else {}),
        rest,
        run.work.get(REFRESH, Work()),
    )


def with_layers(config: Config, number: int) -> Config:
    """Return the configuration with the first `number` layers only, one of them dense if the model has dense layers."""
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
