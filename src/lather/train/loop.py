"""A training run, from its start or from its newest checkpoint, to its end.

A step is recorded in an order that makes a kill harmless at any time: metrics row, validation row,
then the checkpoint. A run that is started again cuts its metrics to the newest complete checkpoint
and continues from there.
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

from lather.checkpoint.folder import Progress, Retention, best_checkpoint, list_checkpoints, step_of
from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.save import Saver
from lather.checkpoint.state import TrainingState
from lather.config.changes import values_of
from lather.config.config import Config
from lather.config.toml_file import folder_of
from lather.data.batches import Batch
from lather.device import Read, deterministic, is_gpu, read
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep, learning_rate, pick_device
from lather.engine.step_reading import StepResult
from lather.errors import UserError
from lather.files import optional_file, read_rows, write_aside
from lather.parallel.agreement import broadcast, errors_on_all_ranks, gather, on_rank_0
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import FILE as TIMELINE
from lather.pipeline.timeline import TimelineRecorder, append_timeline
from lather.train import metrics
from lather.train.asking import ALIKE_SECONDS, Asking, TimeLimit
from lather.train.initial_weights import (
    check_same_tokenizer,
    find_start,
    load_start,
    notes_on_start,
)
from lather.train.memory_check import MemoryCheck, agreed_partition
from lather.train.notices import Notices, describe_run
from lather.train.run_dir import RunData, RunDirectory, check_same_data, open_run_data
from lather.train.start import Start
from lather.train.trained_model import SAMPLE, TrainedModel


class DivergedError(RuntimeError):
    """Too many consecutive steps had a loss or gradient that was not finite."""


@runtime_checkable
class Display(Protocol):
    """Shows the progress of a run."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def step(self, row: metrics.StepRow, num_steps: int) -> None:
        """Show a completed training step."""


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run."""

    finished: bool
    """False if a signal or `train.minutes` ended the run early; the same command resumes it."""
    step: int
    seconds: float
    validation_losses: list[float | None]
    """All of the run, first to last; None for one that was not finite. On rank 0 alone: empty on
    the others."""
    sample: str
    checkpoint: Path
    out_of_time: bool = False
    """Whether `train.minutes` ended the run. On rank 0 alone: False on the others."""


def train(
    config: Config,
    display: Display,
    stop: Callable[[], bool] = lambda: False,
    mesh: Mesh | None = None,
    asking: Asking | None = None,
) -> RunOutcome:
    """Run `config` to its end, resuming the run that its directory holds. Between steps, `stop`
    returns whether to save and end early; `asking` takes its place and has further requests.

    On a mesh every rank calls this; rank 0 writes and displays. The run stops if `stop` is true on
    any rank. Without a mesh: one process.

    Raises:
        UserError: an error that the user can correct; nothing was overwritten.
        DivergedError: `train.max_skipped_steps` consecutive steps were not finite.
        OSError: a checkpoint cannot be written; or the metrics cannot, and a checkpoint was saved.
    """
    mesh, asking = mesh or Mesh.single(pick_device(config.train.device)), asking or Asking(stop)
    run_dir: RunDirectory | None = None
    with contextlib.ExitStack() as cleanup:
        with errors_on_all_ranks(mesh.control_group):
            if mesh.rank == 0:
                run_dir = cleanup.enter_context(contextlib.closing(RunDirectory(config)))
        try:
            run = _prepared_run(config, mesh, display, run_dir)
        except UserError:
            if run_dir is not None:
                run_dir.abandon()
            raise
        with deterministic(run.config.train.deterministic):
            return run.train(asking)


def _prepared_run(
    config: Config, mesh: Mesh, display: Display, run_dir: RunDirectory | None
) -> _TrainingRun:
    """Find initial weights or checkpoint, open the data, build model and optimizer, and record what
    the run is made from. Only rank 0 has `run_dir`; all ranks use what it finds there."""
    group, rate_is_given = mesh.control_group, config.optim.lr is not None
    begin = broadcast(None if run_dir is None else run_dir.start, group)
    assert begin is not None
    config = begin.config
    with errors_on_all_ranks(group):  # each rank reads its part, and so needs the folder
        is_begun = bool(list_checkpoints(Path(config.run_dir) / "checkpoints"))
        source = find_start(config) if config.init_from and not is_begun else None
    source = broadcast(source, group)
    data = _open_data(begin, mesh, display, run_dir, source)
    run = _TrainingRun(config, data, mesh, display, source)
    if run_dir is not None and source is not None:
        for note in notes_on_start(source):
            display.note(f"note: {note}")
    if source is not None and not rate_is_given and not config.lora.rank:
        display.note(
            "the default rate is for random weights and may undo what these have learned: give "
            "--optim.lr, a tenth or less"
        )
    if begin.changes:
        rate = learning_rate(begin.step + 1, config.optim, config.train.steps)
        display.note(f"{begin.changes}; the learning rate of step {begin.step + 1} is {rate:.3g}")
    with errors_on_all_ranks(group):
        if run_dir is not None:
            run_dir.record(
                data,
                {
                    "ranks": mesh.describe() if mesh.size > 1 else "1 rank",
                    "device": mesh.device.type,
                },
            )
    return run


def _open_data(
    begin: Start, mesh: Mesh, display: Display, run_dir: RunDirectory | None, source: Path | None
) -> RunData:
    """Open the data sets: first on rank 0, which may have to tokenize text, then on the others,
    which check that they see the same."""
    config, phases = begin.config, begin.history.phases(begin.config.train.batch_size)
    data: RunData | None = None
    with errors_on_all_ranks(mesh.control_group):
        if run_dir is not None:
            data = open_run_data(config, display.note, phases)
            if source is not None and data.tokenizer is not None:
                check_same_tokenizer(folder_of(config.init_from), data.tokenizer)
            run_dir.check_data(data)
    identities = broadcast({} if data is None else data.identities, mesh.control_group)
    with errors_on_all_ranks(mesh.control_group):
        data = data or open_run_data(config, display.note, phases)
        check_same_data(data, identities)
    return data


class _TrainingRun:
    """One rank of a run."""

    def __init__(
        self, config: Config, data: RunData, mesh: Mesh, display: Display, start: Path | None
    ) -> None:
        """`start`: a checkpoint or folder with initial weights."""
        self.config, self.path, self.mesh, self.display = (
            config,
            Path(config.run_dir),
            mesh,
            display,
        )
        self.batches, self.held_out = data.batches, data.held_out
        self.timeline = TimelineRecorder(mesh.device, mesh.rank, mesh.size)
        partition = agreed_partition(config, mesh)
        self.engine = build_engine(
            config,
            mesh,
            record=self.timeline,
            layers=None if partition is None else partition.stages,
        )
        self.optimizer = build_optimizer(config.optim, self.engine.parameters)
        self.step = TrainStep(self.engine, self.optimizer, config.train.max_grad_norm)
        state = TrainingState(self.engine.parameters, self.engine.part, self.optimizer, mesh)
        saving, folder = config.checkpoint, self.path / "checkpoints"
        retention = Retention(saving.keep_last, saving.keep_every)
        self.saver = Saver(folder, state, retention=retention, asynchronous=saving.asynchronous)
        existing = broadcast(list_checkpoints(folder), mesh.control_group)
        self.progress = load_checkpoint(existing[-1], state) if existing else Progress(0, 0.0)
        if start is not None:
            load_start(start, state)
        if existing:
            display.note(f"resuming {existing[-1]}")
        elif start is not None:
            display.note(f"starting from the weights of {start}")
        layers, num_sequences = (
            self.engine.part.share.layers_of_stage,
            sum(self.batches.order.sizes),
        )
        for line in describe_run(config, mesh, num_sequences, layers):
            display.note(line)
        self.metrics: metrics.MetricsWriter | None = None
        if mesh.rank == 0:
            resumed_step = self.progress.step if existing else None
            if (self.path / TIMELINE).exists():
                metrics.cut_rows(self.path / TIMELINE, resumed_step)
            log = config.log
            self.metrics = metrics.MetricsWriter(
                self.path,
                resumed_step,
                tensorboard=log.tensorboard,
                wandb_project=log.wandb_project,
                mlflow_experiment=log.mlflow_experiment,
                configuration=values_of(config),
                note=display.note,
            )
        self.memory = MemoryCheck(config, mesh, display.note, partition)
        self.notices = Notices(config, display.note, mesh)
        self.saved_for = 0.0
        """When the last checkpoint that was asked for was begun, in seconds of `time.monotonic`."""
        self.out_of_time = False
        self.unwritten: OSError | None = None
        """The error with which a row of the metrics could not be written."""
        self.lowest_loss = math.inf
        if saving.keep_best:
            steps, file = {step_of(path) for path in existing}, self.path / "metrics.jsonl"
            self._keep_best(
                on_rank_0(lambda: best_checkpoint(steps, read_rows(file)), mesh.control_group)
            )

    def train(self, asking: Asking) -> RunOutcome:
        steps = self.config.train.steps
        limit = self._time_limit(asking.started)
        try:
            if self.mesh.pp > 1 and is_gpu(self.mesh.device):
                self.engine.run_prelude(self._batch(min(self.progress.step + 1, steps)))
            if not self._any(self.metrics is not None and bool(read_rows(self.metrics.path))):
                self._validate()
            if self.progress.step >= steps:
                self.display.note(f"all {steps:,} steps are done; a larger --train.steps continues")
            self.memory.before_first_step()
            self.notices.begin()
            while self.progress.step < steps and not self._is_over(asking, limit):
                start = time.monotonic()
                self._one_step()
                step = self.progress.step
                is_best = (
                    step == steps or _is_due(step, self.config.train.validation_every)
                ) and self._validate()
                limit.took_step(time.monotonic() - start)
                if (is_best or _is_due(step, self.config.checkpoint.every)) and step < steps:
                    self._save()
            checkpoint = self._save()
            self.saver.wait()
            self.memory.finish(self.engine, self.optimizer)
        except DivergedError:  # on all ranks
            self.saver.wait()
            raise
        finally:
            if self.metrics is not None:
                with self._keeping_error():
                    self.metrics.close()
        # rank 0 draws, and loads the model for the sample
        with errors_on_all_ranks(self.mesh.control_group):
            if self.unwritten is not None:
                self.display.note(f"saved {checkpoint}, but not all metrics")
                raise self.unwritten
            return self._outcome(checkpoint)

    def _time_limit(self, started: float) -> TimeLimit:
        minutes = self.config.train.minutes
        num_bytes = sum(piece.value.nbytes for piece in self.saver.state.pieces()) if minutes else 0
        return TimeLimit(minutes, started, num_bytes)

    def _is_over(self, asking: Asking, limit: TimeLimit) -> bool:
        """Obey what is asked of any rank: save a checkpoint, or return that the run ends, which all
        ranks do after the same step. Rank 0's clock and its metrics count."""
        is_late = self.mesh.rank == 0 and limit.is_reached(self.saver.longest)
        wants_end = asking.stop() or is_late or self.unwritten is not None
        wants_save = asking.save() > self.saved_for + ALIKE_SECONDS
        wanted = self._most(2.0 if wants_end else 1.0 if wants_save else 0.0)
        if wanted == 1:
            self.saved_for = time.monotonic()
            self.display.note(f"step {self.progress.step}: SIGUSR1 saves {self._save()}")
        self.out_of_time = is_late and not asking.stop() and self.unwritten is None
        return wanted == 2

    def _outcome(self, checkpoint: Path) -> RunOutcome:
        finished = self.progress.step == self.config.train.steps
        rows = [] if self.metrics is None else read_rows(self.metrics.path)
        losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
        sample = self._sample(checkpoint) if finished and self.mesh.rank == 0 else ""
        if sample:
            with optional_file(self.path / SAMPLE, self.display.note):
                write_aside(self.path / SAMPLE, sample)
        if finished and self.config.log.picture and any(metrics.training_rows(rows)):
            from lather.train.report import draw_run  # matplotlib takes a second to import

            draw_run(self.path, self.display.note)
        return RunOutcome(
            finished,
            self.progress.step,
            self.progress.seconds,
            losses,
            sample,
            checkpoint,
            self.out_of_time,
        )

    @contextlib.contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Write metrics in the block: if they cannot be written, keep the error until all ranks
        have saved a checkpoint and end."""
        try:
            yield
        except OSError as error:
            self.unwritten = self.unwritten or error

    def _any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; all ranks get the same answer."""
        return self._most(float(flag)) > 0

    def _most(self, value: float) -> float:
        """Return the maximum of `value` over all ranks."""
        if self.mesh.size == 1:
            return value
        most = torch.tensor(value, dtype=torch.float64, device=self.mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return read(most, Read.VOTE).item()

    def _one_step(self) -> None:
        start = time.perf_counter()
        number = self.progress.step + 1
        lr = learning_rate(number, self.config.optim, self.config.train.steps)
        is_recorded = _is_due(number, self.config.log.timeline_every)
        if is_recorded:
            self.timeline.begin()
        result = self.step(self._batch(number), lr)
        if is_recorded and (of_ranks := gather(self.timeline.end(), self.mesh.control_group)):
            with optional_file(self.path / TIMELINE, self.display.note):
                append_timeline(self.path / TIMELINE, number, chain.from_iterable(of_ranks))
        step_seconds = time.perf_counter() - start
        in_a_row = self.progress.skipped_in_a_row
        if result.tokens:  # a step without labels says nothing about whether the run diverges
            in_a_row = in_a_row + 1 if result.skipped else 0
        self.progress = Progress(number, self.progress.seconds + step_seconds, in_a_row)
        peak = metrics.take_peak_memory_bytes(self.mesh.device)
        self.memory.saw(peak)
        row = self._row(result, lr, step_seconds, peak)
        self._write(row)
        if _is_due(number, self.config.log.expert_load_every) and result.counts_LE.any():
            self._write(
                {
                    "step": number,
                    "seconds": self.progress.seconds,
                    "expert_load": metrics.load_per_expert(result.counts_LE),
                }
            )
        self.display.step(row, self.config.train.steps)
        self.notices.saw_step(number, result, step_seconds)
        if in_a_row >= self.config.train.max_skipped_steps:
            raise DivergedError(
                f"{in_a_row} steps in a row, the last of them step {number}, had a loss or "
                "gradient that was not finite: "
                f"lower optim.lr (now {self.config.optim.peak_lr:g}) or raise optim.warmup_steps, "
                "and continue from an earlier checkpoint "
                f"in another folder, with --fork-from {self.path}@STEP and --run-dir, or start a "
                "new run"
            )

    def _batch(self, number: int) -> Batch:
        """Read this rank's share of the batch of a step."""
        return self.batches.batch(number, self.mesh.data_rank, self.mesh.data_size)

    def _row(
        self, result: StepResult, lr: float, step_seconds: float, peak: int
    ) -> metrics.StepRow:
        loads = metrics.expert_load(result.counts_LE) if result.tokens else (math.nan,) * 3
        return metrics.StepRow(
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
            expert_load_min=loads[0],
            expert_load_max=loads[1],
            expert_load_entropy=loads[2],
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
        """Evaluate on the held-out sequences, the same ones every time. Returns whether to save a
        checkpoint because the loss of the first set, which is the run's validation loss, is the
        lowest so far."""
        ranks = self.mesh.data_rank, self.mesh.data_size
        batches = {name: held_out.batch(*ranks) for name, held_out in self.held_out.items()}
        found = {name: self.engine.validation_loss(batch) for name, batch in batches.items()}
        if not found:
            return False
        losses = {name: math.nan if loss is None else loss for name, loss in found.items()}
        loss = next(iter(losses.values()))
        row: metrics.ValidationRow = {
            "step": self.progress.step,
            "seconds": self.progress.seconds,
            "validation_loss": loss,
        }
        if len(losses) > 1:
            row["validation_losses"] = losses
        self._write(row)
        shown = {name: "-" if loss is None else f"{loss:.4f}" for name, loss in found.items()}
        of_sets = ", ".join(f"{name} {text}" for name, text in shown.items())
        first = next(iter(shown.values())) + (f" ({of_sets})" if len(shown) > 1 else "")
        self.display.note(f"step {self.progress.step}: validation loss {first}")
        sizes = {name: len(held_out.indices) for name, held_out in self.held_out.items()}
        self.notices.saw_validation(found, sizes)
        is_best = (
            self.config.checkpoint.keep_best and self.progress.step > 0 and loss < self.lowest_loss
        )
        if is_best:
            self._keep_best((loss, self.progress.step))
        return is_best

    def _write(self, row: metrics.Row) -> None:
        if self.metrics is not None:
            with self._keeping_error():
                self.metrics.write(row)

    def _save(self) -> Path:
        if self.metrics is not None:
            with self._keeping_error():
                self.metrics.sync()
        return self.saver.save(self.progress)

    def _sample(self, checkpoint: Path) -> str:
        """Generate the sample if it is wanted and the run has a tokenizer; data sets of token files
        may have none.

        On a mesh no rank has the whole model, so rank 0 loads it from the checkpoint.
        """
        if not self.config.log.sample_tokens or not (self.path / "tokenizer.json").exists():
            return ""
        return TrainedModel(self.path, checkpoint, self.config).sample(
            next(iter(self.held_out.values()), None), self.mesh.device
        )


def _is_due(step: int, every: int) -> bool:
    """Return whether something that is done every so many steps (0: never) is done at this one."""
    return every > 0 and step % every == 0
