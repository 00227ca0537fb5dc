"""A training run, from its start or from its newest checkpoint, to its end.

A step is recorded in an order that makes a kill harmless at any time: metrics row, validation row,
then the checkpoint. A run that is started again cuts its metrics to the newest complete checkpoint
and continues from there.
"""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lather.checkpoint.folder import Progress, Retention, list_checkpoints, step_of
from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.save import Saver
from lather.checkpoint.state import TrainingState
from lather.config.config import Config
from lather.data.batches import Batch
from lather.device import Read, deterministic, is_gpu, read
from lather.engine import nan_search
from lather.engine.averaged_weights import averaged_weights
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer, head_rows
from lather.engine.step import TrainStep, learning_rates, pick_device
from lather.errors import UserError
from lather.files import optional_file
from lather.parallel.agreement import broadcast, errors_on_all_ranks, gather
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import FILE as TIMELINE
from lather.pipeline.timeline import TimelineRecorder, append_timeline
from lather.train import metrics
from lather.train.best import BestValidation
from lather.train.care import Care
from lather.train.diverged import DivergedError, diverged
from lather.train.initial_weights import find_weights, load_weights, notes_on_weights
from lather.train.memory_check import MemoryCheck, agreed_partition
from lather.train.notices import Notices, describe_run, rates_at
from lather.train.outcome import RunOutcome, finish, outcome_of
from lather.train.pace import PaceMeter
from lather.train.requests import SAME_REQUEST_SECONDS, RunRequests, TimeLimit
from lather.train.roll_back import RolledBack, keep_rows, went_back_in_vain
from lather.train.run_dir import RunData, RunDirectory, open_on_all_ranks, with_epochs
from lather.train.run_record import RunRecord
from lather.train.step_profile import StepProfile
from lather.train.validation import Validation


@runtime_checkable
class Display(Protocol):
    """Shows the progress of a run."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def step(self, row: metrics.StepRow, num_steps: int) -> None:
        """Show a completed training step."""


def train(
    config: Config,
    display: Display,
    requests: RunRequests | None = None,
    mesh: Mesh | None = None,
) -> RunOutcome:
    """Run `config` to its end, resuming the run that its directory holds, also after a spike with
    `train.spikes = "roll_back"`.

    On a mesh every rank calls this; rank 0 writes and displays, and all ranks obey the requests to
    any rank. Without a mesh: one process.

    Raises:
        UserError: an error that the user can correct; nothing was overwritten.
        DivergedError: `train.max_skipped_steps` consecutive steps were not finite, or spikes.
        OSError: a checkpoint cannot be written; or the metrics cannot, and a checkpoint was saved.
    """
    mesh = mesh or Mesh.single(pick_device(config.train.device))
    requests = requests or RunRequests()
    rolled_back = RolledBack(config.train.skip_steps)
    while True:
        loop = replace(config.train, skip_steps=rolled_back.skip_steps)
        ended = _launch(replace(config, train=loop), display, requests, mesh, rolled_back)
        if isinstance(ended, RunOutcome):
            return ended
        rolled_back = ended
        gc.collect()  # the model and the optimizer, before they are built again


def _launch(
    config: Config, display: Display, requests: RunRequests, mesh: Mesh, rolled_back: RolledBack
) -> RunOutcome | RolledBack:
    """Run `config` until it ends or has to go back to a checkpoint."""
    run_dir: RunDirectory | None = None
    with contextlib.ExitStack() as cleanup:
        with errors_on_all_ranks(mesh.control_group):
            if mesh.rank == 0:
                run_dir = cleanup.enter_context(contextlib.closing(RunDirectory(config)))
        try:
            run = _prepared_run(config, mesh, display, run_dir, rolled_back.data)
        except UserError:
            if run_dir is not None:
                run_dir.abandon()
            raise
        with deterministic(run.config.train.deterministic):
            return run.train(requests, rolled_back)


def _prepared_run(
    config: Config,
    mesh: Mesh,
    display: Display,
    run_dir: RunDirectory | None,
    data: RunData | None,
) -> _TrainingRun:
    """Find initial weights or checkpoint, open the data unless they are given, build model and
    optimizer, and record what the run is made from. Only rank 0 has `run_dir`; all ranks use what
    it finds there."""
    group, has_rate = mesh.control_group, config.optim.lr is not None
    start = broadcast(None if run_dir is None else run_dir.start, group)
    assert start is not None
    config = start.config
    with errors_on_all_ranks(group):  # each rank reads its part, and so needs the folder
        is_resumed = bool(list_checkpoints(Path(config.run_dir) / "checkpoints"))
        weights = find_weights(config) if config.init_from and not is_resumed else None
    weights = broadcast(weights, group)
    data = data or open_on_all_ranks(start, mesh, display.note, run_dir, weights)
    start = with_epochs(start, data, mesh, display.note, run_dir)
    config = start.config
    run = _TrainingRun(config, data, mesh, display, weights, run_dir)
    if weights is not None:
        for text in notes_on_weights(weights, config):
            display.note(f"note: {text}")
        if not has_rate and not config.lora.rank:
            display.note(
                "the default rate is for random weights and may undo what these have learned: give "
                "--optim.lr, a tenth or less"
            )
    if start.changes:
        display.note(f"{start.changes}; {rates_at(start.step + 1, config)}")
    with errors_on_all_ranks(group):
        if run_dir is not None:
            ranks = mesh.describe() if mesh.size > 1 else "1 rank"
            run_dir.record(data, {"ranks": ranks, "device": mesh.device.type})
    return run


class _TrainingRun:
    """One rank of a run."""

    def __init__(
        self,
        config: Config,
        data: RunData,
        mesh: Mesh,
        display: Display,
        weights: Path | None,
        run_dir: RunDirectory | None,
    ) -> None:
        """`weights`: a checkpoint or folder with initial weights. Only rank 0 has `run_dir`."""
        self.config, self.mesh, self.display = config, mesh, display
        self.path, self.run_dir = Path(config.run_dir), run_dir
        self.data, self.batches, self.held_out = data, data.batches, data.held_out
        self.best = BestValidation(config, [*data.held_out])
        self.timeline = TimelineRecorder(mesh.device, mesh.rank, mesh.size)
        partition = agreed_partition(config, mesh)
        layers = None if partition is None else partition.stages
        self.engine = build_engine(config, mesh, record=self.timeline, layers=layers)
        self.optimizer = build_optimizer(config.optim, self.engine.parameters, head_rows(config))
        self.average = averaged_weights(config.train, self.engine.parameters, self.optimizer)
        clips = config.train.max_grad_norm, config.train.qk_clip
        self.step = TrainStep(self.engine, self.optimizer, *clips)
        self.saver = self._new_saver()
        checkpoints = broadcast(list_checkpoints(self.saver.folder), mesh.control_group)
        self.progress = self._load(checkpoints, weights)
        num_sequences = sum(self.batches.order.sizes)
        stages = self.engine.part.share.layers_of_stage
        for line in describe_run(config, mesh, num_sequences, stages):
            display.note(line)
        resumed_step = self.progress.step if checkpoints else None
        self.record = RunRecord(config, mesh, resumed_step, display.note)
        self.pace = PaceMeter(config, self.batches, mesh)
        self.memory = MemoryCheck(config, mesh, display.note, partition)
        self.notices = Notices(config, display.note)
        self.care = Care(config, self.batches, self.record, display.note)
        self.step.is_spike = self.care.is_spike
        self.validation = Validation(
            self.engine, self.average, data.held_out, self.notices, display.note
        )
        self.profile = StepProfile(config, mesh, display.note, self.progress.step)
        self.last_request = 0.0
        """When the last requested checkpoint was started, in seconds of `time.monotonic`."""
        self.out_of_time = False
        if self.best.keeps:
            found = self.record.of_rows(self.best.of_rows)
            self.best.restore(found, {step_of(path) for path in checkpoints})
            self._keep_best()

    def _new_saver(self) -> Saver:
        saving, engine = self.config.checkpoint, self.engine
        return Saver(
            self.path / "checkpoints",
            TrainingState(engine.parameters, engine.part, self.optimizer, self.mesh, self.average),
            retention=Retention(saving.keep_last, saving.keep_every),
            asynchronous=saving.asynchronous,
        )

    def _load(self, checkpoints: list[Path], weights: Path | None) -> Progress:
        """Load the newest checkpoint, or else the initial weights; return the progress."""
        if checkpoints:
            progress = load_checkpoint(checkpoints[-1], self.saver.state)
            self.display.note(f"resuming {checkpoints[-1]}")
            return progress
        if weights is not None:
            load_weights(weights, self.saver.state, self.config)
            if self.average is not None:
                self.average.restart()
            self.display.note(f"starting from the weights of {weights}")
        return Progress(0, 0.0)

    def _keep_best(self) -> None:
        self.saver.retention = replace(self.saver.retention, best=self.best.step)

    def train(self, requests: RunRequests, rolled_back: RolledBack) -> RunOutcome | RolledBack:
        train, saving = self.config.train, self.config.checkpoint
        limit = self._time_limit(requests.started)
        try:
            self._before_first_step()
            while self._goes_on() and not self._must_end(requests, limit):
                start = time.monotonic()
                with self.profile.step(self.progress.step + 1):
                    self._train_step()
                step = self.progress.step
                if self.care.must_roll_back:
                    self.saver.wait()
                    return self._roll_back(rolled_back)
                is_validated = step == train.steps or _is_due(step, train.validation_every)
                is_best = is_validated and self._validate()
                limit.count_step(time.monotonic() - start)
                if (is_best or _is_due(step, saving.every)) and step < train.steps:
                    self._save()
            self.profile.finish()
            checkpoint = self._save()
            self.saver.wait()
            if self.best.is_over:
                self.display.note(self.best.describe(self.config.run_dir))
            averages = () if self.average is None else self.average.values.values()
            self.memory.finish(self.engine, self.optimizer, averages)
        except DivergedError:  # on all ranks
            self.saver.wait()
            raise
        finally:
            self.record.close()
        # rank 0 draws, and loads the model for the sample
        with errors_on_all_ranks(self.mesh.control_group):
            if self.record.error is not None:
                self.display.note(f"saved {checkpoint}, but not all metrics")
                raise self.record.error
            return self._outcome(checkpoint)

    def _roll_back(self, before: RolledBack) -> RolledBack:
        """Return how the run goes on from the newest checkpoint: without the steps since then."""
        self._check_in_place()
        checkpoints = broadcast(list_checkpoints(self.saver.folder), self.mesh.control_group)
        checkpoint = step_of(checkpoints[-1]) if checkpoints else 0
        again = before.again(checkpoint, self.progress.step, self.data)
        if again.times > self.config.train.max_skipped_steps:
            raise went_back_in_vain(self.config, again)
        if self.record.writes:
            keep_rows(self.path, self.record.rows(), checkpoint, self.display.note)
        self.display.note(
            f"the run goes back to step {checkpoint}, and leaves out steps {checkpoint + 1} to "
            f"{self.progress.step}"
        )
        return again

    def _time_limit(self, started: float) -> TimeLimit:
        minutes = self.config.train.minutes
        if not minutes:
            return TimeLimit(minutes, started, 0)
        self.optimizer.init_state()  # which the first checkpoint has
        num_bytes = sum(piece.value.nbytes for piece in self.saver.state.pieces())
        return TimeLimit(minutes, started, num_bytes)

    def _before_first_step(self) -> None:
        steps = self.config.train.steps
        if self.mesh.pp > 1 and is_gpu(self.mesh.device):
            self.engine.run_prelude(self._batch(min(self.progress.step + 1, steps)))
        if not self._max_of_ranks(bool(self.record.rows())):
            self._validate()
        if self.progress.step >= steps:
            longer = "--train.epochs" if self.config.train.epochs else "--train.steps"
            self.display.note(f"all {steps:,} steps are done; a larger {longer} continues")
        self.memory.before_first_step()

    def _must_end(self, requests: RunRequests, limit: TimeLimit) -> bool:
        """Obey the requests to any rank: save a checkpoint, or return that the run ends, which all
        ranks do after the same step. Rank 0's clock and its metrics count."""
        is_late = self.mesh.rank == 0 and limit.is_reached(self.saver.longest)
        must_end = requests.stop() or self.record.error is not None
        must_save = requests.save() > self.last_request + SAME_REQUEST_SECONDS
        urgency = self._max_of_ranks(2 if must_end or is_late else int(must_save))
        if urgency == 1:
            self.last_request = time.monotonic()
            self.display.note(f"step {self.progress.step}: SIGUSR1 saves {self._save()}")
        self.out_of_time = is_late and not must_end
        return urgency == 2

    def _goes_on(self) -> bool:
        return self.progress.step < self.config.train.steps and not self.best.is_over

    def _max_of_ranks(self, value: float) -> float:
        if self.mesh.size == 1:
            return value
        most = torch.tensor(value, dtype=torch.float64, device=self.mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return read(most, Read.VOTE).item()

    def _train_step(self) -> None:
        start = time.perf_counter()
        number = self.progress.step + 1
        rates = learning_rates(number, self.config.optim, self.config.train.steps)
        is_recorded = _is_due(number, self.config.log.timeline_every)
        if is_recorded:
            self.timeline.begin()
        with_logits = _is_due(number, self.config.log.attention_logits_every)
        num_tokens = 0
        if self.care.leaves_out(number):
            result = self.step.leave_out()
        else:
            batch = self._batch(number)
            result = self.step(batch, rates, with_logits=with_logits)
            num_tokens = batch.tokens_of_all or 0 if result.tokens else 0
        if self.average is not None and not result.skipped:
            self.average.update(number)
        if is_recorded and (of_ranks := gather(self.timeline.end(), self.mesh.control_group)):
            with optional_file(self.path / TIMELINE, self.display.note):
                append_timeline(self.path / TIMELINE, number, chain.from_iterable(of_ranks))
        seconds = time.perf_counter() - start
        skipped = self.progress.skipped_in_a_row
        if result.tokens:  # a step without labels says nothing about whether the run diverges
            skipped = skipped + 1 if result.skipped else 0
        self.progress = Progress(number, self.progress.seconds + seconds, skipped)
        peak = metrics.take_peak_memory_bytes(self.mesh.device)
        self.memory.record_peak(peak)
        peak = int(self._max_of_ranks(peak))
        pace = self.pace.after(number, num_tokens, seconds)
        row = metrics.step_row(result, self.progress, pace, rates[""], seconds, peak)
        self.record.write(row)
        if _is_due(number, self.config.log.expert_load_every) and result.counts_LE.any():
            self.record.write(metrics.expert_load_row(result.counts_LE, self.progress))
        if with_logits and result.logits_AH is not None:
            self.record.write(metrics.attention_logits_row(result.logits_AH, self.progress))
        self.display.step(row, self.config.train.steps)
        self.notices.watch_step(number, result)
        self.care.report(result, self.progress, partial(self._find_origin, number))
        if skipped >= self.config.train.max_skipped_steps and not self.care.must_roll_back:
            raise diverged(self.config, self.progress, result)

    def _find_origin(self, number: int) -> list[str]:
        finding = nan_search.search(self.engine, self._batch(number))
        return nan_search.describe(gather(finding, self.mesh.control_group))

    def _batch(self, number: int) -> Batch:
        """Read this rank's share of the batch of a step."""
        return self.batches.batch(number, self.mesh.data_rank, self.mesh.data_size)

    def _validate(self) -> bool:
        """Validate; return whether to save a checkpoint because the validation loss, that of the
        weights, is the lowest so far."""
        row = self.validation.run(self.progress)
        if row is None:
            return False
        self.record.write(row)
        is_best = self.best.add(row)
        self._keep_best()
        return is_best

    def _check_in_place(self) -> None:
        """Raise RunError on all ranks if the run's folder was deleted or replaced."""
        with errors_on_all_ranks(self.mesh.control_group):
            if self.run_dir is not None:
                self.run_dir.check_in_place()

    def _save(self) -> Path:
        self._check_in_place()
        self.record.sync()
        return self.saver.save(self.progress)

    def _outcome(self, checkpoint: Path) -> RunOutcome:
        finished = not self._goes_on()
        outcome = outcome_of(self.record.rows(), self.progress, checkpoint)
        outcome = replace(outcome, finished=finished, out_of_time=self.out_of_time)
        if not finished or self.mesh.rank != 0:
            return outcome
        held_out = next(iter(self.held_out.values()), None)
        return finish(outcome, self.config, held_out, self.mesh.device, self.display.note)


def _is_due(step: int, every: int) -> bool:
    """Return whether a thing that happens every `every` steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0
