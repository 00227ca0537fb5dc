"""A training run, from its start or from its newest checkpoint, to its end.

A step is recorded in an order that makes a kill harmless at any time: metrics row, validation row, then the checkpoint. A run that is
started again cuts its metrics to the newest complete checkpoint and continues from there.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lather.checkpoint.find import best_checkpoint
from lather.checkpoint.folder import Retention, list_checkpoints, step_of
from lather.checkpoint.load import load_checkpoint
from lather.checkpoint.saver import Saver
from lather.checkpoint.state import TrainingState
from lather.checkpoint.table import Progress
from lather.config.config import Config
from lather.config.toml_file import folder_of
from lather.device import deterministic
from lather.engine.engine import build_engine, build_model
from lather.engine.optimizer import build_optimizer
from lather.engine.step import StepResult, TrainStep, learning_rate, pick_device
from lather.engine.trained_parameters import trained_parameters
from lather.errors import UserError
from lather.files import read_rows, write_aside
from lather.parallel.agreement import broadcast, errors_on_all_ranks, gather, on_rank_0
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import FILE as TIMELINE
from lather.pipeline.timeline import TimelineRecorder, append_timeline
from lather.train.initial_weights import check_same_tokenizer, find_start, load_start
from lather.train.memory_check import MemoryCheck, agreed_partition
from lather.train.metrics import (
    MetricsWriter,
    Row,
    StepRow,
    ValidationRow,
    cut_rows,
    expert_load,
    load_per_expert,
    take_peak_memory_bytes,
    training_rows,
)
from lather.train.resume import Start
from lather.train.run_data import RunData, check_same_data, open_run_data
from lather.train.run_dir import RunDirectory
from lather.train.sampling import SAMPLE, sample_text


class DivergedError(RuntimeError):
    """Too many consecutive steps had a loss or gradient that was not finite."""


@runtime_checkable
class Display(Protocol):
    """Shows the progress of a run."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def step(self, row: StepRow, num_steps: int) -> None:
        """Show a completed training step."""


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run."""

    finished: bool
    """False if a signal ended the run early; the same command resumes it."""
    step: int
    seconds: float
    first_validation_loss: float | None
    last_validation_loss: float | None
    sample: str
    checkpoint: Path


def train(config: Config, display: Display, stop: Callable[[], bool] = lambda: False, mesh: Mesh | None = None) -> RunOutcome:
    """Run `config` to its end, resuming the run that its directory holds. Between steps, `stop` returns whether to save and end early.

    On a mesh every rank calls this; rank 0 writes and displays. The run stops if `stop` is true on any rank. Without a mesh: one process.

    Raises:
        UserError: an error that the user can correct; nothing was overwritten.
        DivergedError: `train.max_skipped_steps` consecutive steps were not finite.
    """
    mesh = mesh or Mesh.single(pick_device(config.train.device))
    with _run_directory(config, mesh) as run_dir:
        try:
            run = _prepared_run(config, mesh, display, run_dir)
        except UserError:
            if run_dir is not None:
                run_dir.abandon()
            raise
        with deterministic(run.config.train.deterministic):
            return run.train(stop)


@contextlib.contextmanager
def _run_directory(config: Config, mesh: Mesh) -> Iterator[RunDirectory | None]:
    """Open the run directory on rank 0, and close it after the block; None on the other ranks."""
    run_dir: RunDirectory | None = None
    try:
        with errors_on_all_ranks(mesh.control_group):
            if mesh.rank == 0:
                run_dir = RunDirectory.open(config)
        yield run_dir
    finally:
        if run_dir is not None:
            run_dir.close()


def _prepared_run(config: Config, mesh: Mesh, display: Display, run_dir: RunDirectory | None) -> _TrainingRun:
    """Find initial weights or checkpoint, open the data, build model and optimizer, and record what the run is made from. Only rank 0 has
    `run_dir`; all ranks use what it finds there."""
    group, rate_is_given = mesh.control_group, config.optim.lr is not None
    begin = broadcast(None if run_dir is None else run_dir.start, group)
    assert begin is not None
    config = begin.config
    with errors_on_all_ranks(group):  # each rank reads its part, and so needs the folder
        source = _initial_weights(config)
    source = broadcast(source, group)
    begun_with = on_rank_0(lambda: None if run_dir is None else run_dir.begun_with(), group)
    data = _open_data(begin, begun_with, mesh, display, source)
    with errors_on_all_ranks(group):
        if run_dir is not None:
            run_dir.check_data(data)
    run = _TrainingRun(config, data, mesh, display, source)
    _note_rates(display, begin, starts_from_weights=source is not None and not rate_is_given)
    with errors_on_all_ranks(group):
        if run_dir is not None:
            run_dir.record(data)
    return run


def _open_data(begin: Start, begun_with: str | None, mesh: Mesh, display: Display, source: Path | None) -> RunData:
    """Open the data sets: first on rank 0, which may have to tokenize text, then on the others, which check that they see the same."""
    config, phases = begin.config, begin.history.phases(begin.config.train.batch_size)
    data: RunData | None = None
    with errors_on_all_ranks(mesh.control_group):
        if mesh.rank == 0:
            data = open_run_data(config, display.note, begun_with, phases)
            if source is not None and data.tokenizer is not None:
                check_same_tokenizer(folder_of(config.init_from), data.tokenizer)
    identities = broadcast({} if data is None else data.identities, mesh.control_group)
    with errors_on_all_ranks(mesh.control_group):
        data = data or open_run_data(config, display.note, begun_with, phases)
        check_same_data(data, identities)
    return data


def _note_rates(display: Display, begin: Start, *, starts_from_weights: bool) -> None:
    """Report the changes and the new learning rate; warn if trained weights are to be trained with the default rate."""
    if starts_from_weights and not begin.config.lora.rank:
        display.note("the default rate is for random weights and may undo what these have learned: give --optim.lr, a tenth or less")
    if begin.changes:
        number = begin.step + 1
        rate = learning_rate(number, begin.config.optim, begin.config.train.steps)
        display.note(f"{begin.changes}; the learning rate of step {number} is {rate:.3g}")


def _initial_weights(config: Config) -> Path | None:
    """Return the checkpoint of another run, or the Hugging Face folder, from which a new run starts; None if it does not."""
    if not config.init_from or list_checkpoints(Path(config.run_dir) / "checkpoints"):
        return None
    return find_start(config)


class _TrainingRun:
    """One rank of a run."""

    def __init__(self, config: Config, data: RunData, mesh: Mesh, display: Display, start: Path | None) -> None:
        self.config, self.path, self.mesh, self.display = config, Path(config.run_dir), mesh, display
        train = config.train
        self.batches, self.held_out = data.batches, data.held_out
        self.timeline = TimelineRecorder(mesh.device, mesh.rank, mesh.size)
        partition = agreed_partition(config, mesh)
        self.engine = build_engine(config, mesh, record=self.timeline, layers=None if partition is None else partition.stages)
        self.optimizer = build_optimizer(config.optim, self.engine.parameters)
        self.step = TrainStep(self.engine, self.optimizer, train.max_grad_norm)
        self.state = TrainingState.of_engine(self.engine, self.optimizer)
        checkpoint = config.checkpoint
        retention = Retention(checkpoint.keep_last, checkpoint.keep_every)
        self.saver = Saver(self.path / "checkpoints", self.state, retention=retention, asynchronous=checkpoint.asynchronous)
        existing = broadcast(list_checkpoints(self.path / "checkpoints"), mesh.control_group)
        self.progress = load_checkpoint(existing[-1], self.state) if existing else Progress(0, 0.0)
        if start is not None:
            load_start(start, self.state)
        if existing:
            display.note(f"resuming {existing[-1]}")
        elif start is not None:
            display.note(f"starting from the weights of {start}")
        ranks = "" if mesh.size == 1 else f", {mesh.describe()}"
        trained = trained_parameters(config)
        display.note(
            f"{trained.num_parameters / 1e6:.2f} M parameters, {config.optim.name}, {mesh.device.type}{ranks}, "
            f"{sum(self.batches.order.sizes):,} training sequences"
        )
        if trained.num_trained < trained.num_parameters:
            display.note(trained.describe())
        tokens = train.batch_size * train.sequence_length
        display.note(f"peak learning rates for steps of {tokens:,} tokens: {config.optim.describe_rates()}")
        if mesh.pp > 1:
            display.note(f"layers by stage: {' '.join(str(len(layers)) for layers in self.engine.part.share.layers_of_stage)}")
        self.resumed_step = self.progress.step if existing else None
        self.metrics: MetricsWriter | None = None
        if mesh.rank == 0:
            log = config.log
            if (self.path / TIMELINE).exists():
                cut_rows(self.path / TIMELINE, self.resumed_step)
            self.metrics = MetricsWriter(self.path, self.resumed_step, tensorboard=log.tensorboard, wandb_project=log.wandb_project)
        self.memory = MemoryCheck(config, mesh, display.note, partition)
        self.lowest_loss = math.inf
        if checkpoint.keep_best:
            with errors_on_all_ranks(mesh.control_group):
                best = None if self.metrics is None else best_checkpoint({step_of(path) for path in existing}, read_rows(self.metrics.path))
            self._keep_best(broadcast(best, mesh.control_group))

    def train(self, stop: Callable[[], bool]) -> RunOutcome:
        steps = self.config.train.steps
        try:
            if not self._has_rows():
                self._validate()
            self.memory.before_first_step()
            while self.progress.step < steps and not self._any(stop()):
                self._one_step()
                step = self.progress.step
                every, is_best = self.config.train.validation_every, False
                if step == steps or (every and step % every == 0):
                    is_best = self._validate()
                if (step % self.config.checkpoint.every == 0 or is_best) and step < steps:
                    self._save()
            checkpoint = self._save()
            self.saver.wait()
            self.memory.finish(self.engine, self.optimizer)
        except DivergedError:  # on all ranks
            self.saver.wait()
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()
        with errors_on_all_ranks(self.mesh.control_group):  # rank 0 draws, and loads the model for the sample
            return self._outcome(checkpoint)

    def _outcome(self, checkpoint: Path) -> RunOutcome:
        finished = self.progress.step == self.config.train.steps
        rows = [] if self.metrics is None else read_rows(self.metrics.path)
        losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
        sample = self._sample(checkpoint) if finished and self.mesh.rank == 0 and self._can_sample() else ""
        if sample:
            write_aside(self.path / SAMPLE, sample)
        if finished and self.config.log.picture and any(training_rows(rows)):
            from lather.train.plot import draw  # matplotlib takes a second to import
            from lather.train.report import REPORT, write_report

            draw([self.path], self.path / "loss.png")
            write_report(self.path, self.path / REPORT)
        return RunOutcome(
            finished=finished,
            step=self.progress.step,
            seconds=self.progress.seconds,
            first_validation_loss=losses[0] if losses else None,
            last_validation_loss=losses[-1] if losses else None,
            sample=sample,
            checkpoint=checkpoint,
        )

    def _has_rows(self) -> bool:
        return self._any(self.metrics is not None and bool(read_rows(self.metrics.path)))

    def _any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; all ranks get the same answer."""
        return self._most(float(flag)) > 0

    def _most(self, value: float) -> float:
        """Return the maximum of `value` over all ranks."""
        if self.mesh.size == 1:
            return value
        most = torch.tensor(value, dtype=torch.float64, device=self.mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()

    def _one_step(self) -> None:
        start = time.perf_counter()
        number = self.progress.step + 1
        lr = learning_rate(number, self.config.optim, self.config.train.steps)
        with self._recorded(number):
            result = self.step(self.batches.batch(number, self.mesh.data_rank, self.mesh.data_size), lr)
        step_seconds = time.perf_counter() - start
        in_a_row = self.progress.skipped_in_a_row + 1 if result.skipped else 0
        self.progress = Progress(number, self.progress.seconds + step_seconds, in_a_row)
        peak = take_peak_memory_bytes(self.mesh.device)
        self.memory.saw(peak)
        row = self._row(result, lr, step_seconds, peak)
        self._write(row)
        every = self.config.log.expert_load_every
        if every and number % every == 0 and result.counts_LE.numel():
            self._write({"step": number, "seconds": self.progress.seconds, "expert_load": load_per_expert(result.counts_LE)})
        self.display.step(row, self.config.train.steps)
        if in_a_row >= self.config.train.max_skipped_steps:
            raise DivergedError(
                f"{in_a_row} steps in a row, the last of them step {number}, had a loss or gradient that was not finite: "
                f"lower optim.lr (now {self.config.optim.peak_lr:g}) or raise optim.warmup_steps, and continue from an earlier checkpoint "
                f"in another folder, with --fork-from {self.path}@STEP and --run-dir, or start a new run"
            )

    @contextlib.contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """Write the timeline of the step inside the block if it is due."""
        every = self.config.log.timeline_every
        if not every or step % every:
            yield
            return
        self.timeline.begin()
        yield
        if of_ranks := gather(self.timeline.end(), self.mesh.control_group):
            append_timeline(self.path / TIMELINE, step, chain.from_iterable(of_ranks))

    def _row(self, result: StepResult, lr: float, step_seconds: float, peak: int) -> StepRow:
        least, most, entropy = expert_load(result.counts_LE)
        return StepRow(
            step=self.progress.step,
            loss=result.loss,
            balance_loss=result.balance_loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            tokens_per_second=result.tokens / step_seconds,
            seconds=self.progress.seconds,
            step_seconds=step_seconds,
            optimizer_seconds=result.optimizer_seconds,
            peak_memory_bytes=int(self._most(peak)),
            expert_load_min=least,
            expert_load_max=most,
            expert_load_entropy=entropy,
            refreshes_done=result.refreshes_done,
            refreshes_skipped=result.refreshes_skipped,
            skipped=result.skipped,
        )

    def _keep_best(self, best: tuple[float, int] | None) -> None:
        """Keep the checkpoint of this (validation loss, step) from now on."""
        if best is not None:
            self.lowest_loss, step = best
            self.saver.retention = replace(self.saver.retention, best=step)

    def _validate(self) -> bool:
        """Evaluate on the held-out sequences, the same ones every time. Returns whether to save a checkpoint because the loss of the first
        set, which is the run's validation loss, is the lowest so far."""
        ranks = self.mesh.data_rank, self.mesh.data_size
        losses = {name: self.engine.validation_loss(held_out.batch(*ranks)) for name, held_out in self.held_out.items()}
        if not losses:
            return False
        first = next(iter(losses.values()))
        row: ValidationRow = {"step": self.progress.step, "seconds": self.progress.seconds, "validation_loss": first}
        if len(losses) > 1:
            row["validation_losses"] = losses
        self._write(row)
        each = "" if len(losses) == 1 else f" ({', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())})"
        self.display.note(f"step {self.progress.step}: validation loss {row['validation_loss']:.4f}{each}")
        is_best = self.config.checkpoint.keep_best and self.progress.step > 0 and row["validation_loss"] < self.lowest_loss
        if is_best:
            self._keep_best((row["validation_loss"], self.progress.step))
        return is_best

    def _write(self, row: Row) -> None:
        if self.metrics is not None:
            self.metrics.write(row)

    def _save(self) -> Path:
        if self.metrics is not None:
            self.metrics.sync()
        return self.saver.save(self.progress)

    def _can_sample(self) -> bool:
        """Return whether a sample is wanted and the run has a tokenizer; data sets of token files may have none."""
        return bool(self.config.log.sample_tokens) and (self.path / "tokenizer.json").exists()

    def _sample(self, checkpoint: Path) -> str:
        """Generate the sample. On a mesh no rank has the whole model, so rank 0 loads it from the checkpoint."""
        model = build_model(self.config, self.mesh.device)
        load_checkpoint(checkpoint, TrainingState.of_model(model))
        return sample_text(model, self.config, self.path, next(iter(self.held_out.values()), None), seed=self.config.seed)
