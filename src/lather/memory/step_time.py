"""Predicts how long a training step takes, from the work that a plan's dry runs count.

    seconds = passes / (1 - bubble) + optimizer + exchanges + bus

Passes and optimizer are the kernels of the rank with most of them, each with the longest of three
times at the rates of its kind (`lather.time_model.rates`), one after the other. Where the host runs
ahead of its device, passes and optimizer take at least as long as the host needs for their
launches; on a CPU the host's time is added. No exchange and no transfer between a device and its
host overlaps with kernels. Validations, checkpoints and the reading of data are left out.

A measured run on such a device corrects the prediction: all is scaled by its measured step, divided
by what is predicted for its own configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lather.config.config import Config
from lather.config.run_folder import PROVENANCE
from lather.config.toml_file import load_run
from lather.device import has_word
from lather.engine.trained_parameters import outline, train_only, trained_parameters
from lather.errors import ConfigError, require
from lather.files import read_rows, read_text
from lather.memory.plan import MemoryPlan
from lather.memory.work import MICRO_BATCHES, REFRESH, REST, Work
from lather.memory.workers import Device
from lather.models.model_flops import flops_per_token
from lather.time_model.rates import RATES

LINK = 50e9
"""Assumed bytes per second that a device sends to other machines; no transfer overlaps with
compute."""
BUS = 25e9
"""Assumed bytes per second between a device and its host, in each direction at the same time."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a training step, its parts in seconds before they are scaled."""

    passes: float
    """Forward and backward passes of all micro-batches, with the waits of a pipeline."""
    optimizer: float
    """Everything after the passes, with its share of a refresh."""
    exchanges: float
    """Bytes sent to other ranks."""
    bus: float
    """Bytes between device and host."""
    tokens: int
    """Tokens of a step, all ranks together."""
    run_tokens: int | None
    """Tokens of the run; None: its data (`train.epochs`) are not known."""
    flops: float
    """Model flops of a token (`lather.models.model_flops`)."""
    peak: float
    """Peak flops per second of all devices; 0: not known."""
    scale: float = 1.0
    """Measured time divided by predicted time; 1: nothing was measured."""

    @property
    def seconds(self) -> float:
        return self.scale * (self.passes + self.optimizer + self.exchanges + self.bus)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        return self.flops * self.tokens_per_second / self.peak if self.peak else None

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all steps of the run; None: its data are not known."""
        return None if self.run_tokens is None else self.run_tokens / self.tokens_per_second


def step_time(plan: MemoryPlan, machine: int = 8) -> StepTime:
    """Predict the time of a step, with `machine` devices per machine."""
    config, rates = plan.config, plan.assumed.rate_table
    sizes, steps = config.train.batch_sizes, config.train.steps
    length = config.train.sequence_length
    model = outline(config)
    train_only(model, trained_parameters(config).names)
    return StepTime(
        *parts_of_step(plan, machine),
        tokens=config.train.batch_size * length,
        run_tokens=None if config.train.epochs else sizes.before(steps + 1) * length,
        flops=flops_per_token(model, config.model, length),
        peak=(config.log.peak_flops or rates.peak_flops) * plan.world_size,
    )


def parts_of_step(plan: MemoryPlan, machine: int) -> tuple[float, float, float, float]:
    """Return the seconds of a step's passes, of its optimizer, of bytes sent to other ranks, and of
    bytes between device and host."""
    config, rates = plan.config, plan.assumed.rate_table

    def kernels(work: Work, host_seconds: float) -> float:
        host = work.launches * host_seconds
        return work.seconds + host if rates.waits else max(work.seconds, host)

    def parts(work: Mapping[str, Work]) -> tuple[float, float]:
        host = rates.host_seconds
        of_graph = 0 if config.train.cuda_graph and not rates.waits else host
        of_passes = kernels(work.get(MICRO_BATCHES, Work()), of_graph)
        after = work.get(REST, Work()) + work.get(REFRESH, Work()) * (1 / plan.refresh_interval)
        return of_passes / (1 - plan.bubble()), kernels(after, host)

    passes, optimizer = max((parts(run.work) for run in plan.ranks), key=sum)
    exchanges = exchange_seconds(plan, machine, rates.kinds["exchanges"].bytes)
    return passes, optimizer, exchanges, bus_seconds(plan)


def with_epochs(time: StepTime, plan: MemoryPlan, epoch_size: int) -> StepTime:
    """Return the time with the tokens of a run of `train.epochs` with so many sequences each."""
    train = plan.config.train
    sequences = train.batch_sizes.before(train.steps_of_epochs(epoch_size) + 1)
    return replace(time, run_tokens=sequences * train.sequence_length)


def exchange_seconds(plan: MemoryPlan, machine: int, inside_rate: float) -> float:
    """Return the seconds that the first pipeline rank sends in a step, at `inside_rate` bytes per
    second to ranks of its machine, and at `LINK` to others."""
    work, parallel = plan.work, plan.config.parallel
    inside = work.sent if plan.world_size <= machine else work.experts
    if plan.world_size > machine >= parallel.cp * parallel.ep:
        inside += work.context
    return inside / inside_rate + (work.sent - inside) / LINK


def bus_seconds(plan: MemoryPlan) -> float:
    """Return the seconds in which offloaded state and frozen weights travel between a device and
    its host."""
    fetched, written = plan.bus
    return max(fetched + plan.frozen, written) / BUS


# --- measured runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose steps were measured."""

    config: Config
    """Resolved."""
    world_size: int
    rates: str
    """The name of its device's table, in `RATES`."""
    seconds: float
    """Seconds of a step, with its share of a refresh."""

    def scale(self, planned: MemoryPlan) -> float:
        """Return the measured time of a step divided by what is predicted for the plan of this
        run."""
        return self.seconds / step_time(planned).seconds


def measured_run(rates: str, device: Device) -> MeasuredRun | None:
    """Return the run that the value of `--rates` is the folder of; None for the name of a table,
    or an empty one.

    Raises UserError if it is neither, if the run has no measured step or was on a device without a
    table, or if the rates are not those of `device`.
    """
    run = None
    if rates and rates not in RATES:
        path = Path(rates)
        names = ", ".join(RATES)
        fits = os.path.exists(path / "metrics.jsonl")
        known = f"one of {names}, the folder of a run that has trained, or a file of lather doctor"
        require(fits, "--rates", rates, known)
        run = _read_measured(path, names)
    known = rates if run is None else run.rates
    kind = "cpu" if known == "cpu" else "gpu"
    require(
        not known or kind == device,
        "--rates",
        rates,
        f"rates of a {device.upper()}, with --device {device}: give --device {kind}",
    )
    return run


def _read_measured(path: Path, names: str) -> MeasuredRun:
    config = load_run(path)
    rows = [row for row in read_rows(path / "metrics.jsonl") if "step_seconds" in row]
    step, world_size, name = _last_start(path, names)
    first = max(step, config.train.batch_growth_steps)
    rows = [row for row in rows if row["step"] > first and not row["skipped"]]
    trained = "a run that has trained a step with a whole batch since its last start"
    require(bool(rows), "--rates", str(path), trained)
    rates = next((key for key in RATES if has_word(name, key.upper())), "")
    known = f"a run on a device with known rates, {names}, not on {name}: give the most similar"
    require(bool(rates), "--rates", str(path), known)
    return MeasuredRun(config.resolved(), world_size, rates, typical_seconds(rows))


def _last_start(path: Path, names: str) -> tuple[int, int, str]:
    """Return the step, the number of ranks and the name of the device of a run's last start."""
    try:
        start = json.loads(read_text(path / PROVENANCE))["starts"][-1]
        name = "CPU" if start["device"] == "cpu" else str(start["cuda"])
        return int(start["step"]), int(start["ranks"].split()[0]), name
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"--rates = {str(path)!r}: {PROVENANCE} does not say on which ranks and device the run "
            f"was last started: continue it for a few steps, or give one of {names}"
        ) from None


def typical_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a step from rows of steps, of which the first, which warms up, does not
    count: the median of those without refreshes and that of those with them, by their shares."""
    counted = rows[1:] or rows
    refreshing = [row["step_seconds"] for row in counted if row["refreshes_done"]]
    others = [row["step_seconds"] for row in counted if not row["refreshes_done"]]
    return sum(len(times) * median(times) for times in (refreshing, others) if times) / len(counted)
