"""The measurements of a run: rows in `metrics.jsonl`, and in the trackers that are enabled.

`StepRow`, `ValidationRow` and `ExpertLoadRow` are the schema of the file; a number that is not
finite becomes null. All rows up to a checkpoint are on disk before the checkpoint is. A resumed run
drops later rows, so the file equals that of an uninterrupted run."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor

from lather.checkpoint.folder import Progress
from lather.config.records import LogConfig
from lather.device import gpu_module, is_gpu
from lather.engine.step_reading import StepResult
from lather.files import names_failing_disk, read_rows, sync, write_aside
from lather.train.pace import Pace
from lather.train.trackers import numbers_of, start_trackers


@dataclass(frozen=True)
class StepRow:
    """Measurements of one training step."""

    step: int
    """Number of the step; the first is 1."""
    loss: float
    """Cross entropy in nats per learned token, averaged over the step, with the weights of tokens
    that have some; with `train.dpo_beta` DPO's loss per pair. Null if there was none."""
    mtp_loss: float
    """Cross entropy of multi-token prediction in nats per predicted token, averaged over the step
    and the depths, without its weight; null if the model has no such blocks."""
    balance_loss: float
    """Load-balancing loss, averaged over the MoE blocks and, by tokens without padding, over the
    step, without its coefficient; 1 for an even load, null in a model without experts, like the
    loads below."""
    lr: float
    """Learning rate of matrices and experts in this step."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    tokens: int
    """Tokens trained on in this step: those that are learned."""
    tokens_per_second: float
    """Tokens per second of this step."""
    total_tokens: int
    """Tokens read so far, from the run's first step on: sequences times their length, whether
    learned or not; padding counts, and so do steps that were left out."""
    epoch: float
    """Passes over the training data so far; of a mixture with weights, those over the data set that
    has been read most often."""
    mfu: float
    """Model flops per second of this step as a share of the peak of all devices (`log.peak_flops`);
    null if the peak is not known."""
    seconds: float
    """Seconds of training so far, in all processes that have worked on the run."""
    seconds_left: float
    """Seconds until the last step, by the mean of the recent steps of this process and of what was
    between them; null after its first step."""
    step_seconds: float
    """Seconds of this step."""
    optimizer_seconds: float
    """Seconds of this step in the optimizer."""
    peak_memory_bytes: int
    """Memory of the rank with most. On a GPU the most that was allocated at a time since the
    previous row; on a CPU the most that the process has had in memory at a time (resident) since it
    began."""
    expert_load_min: float
    """Tokens sent to the least loaded expert of any block, relative to an even load: 1 for an even
    load, 0 if it got none."""
    expert_load_max: float
    """Tokens sent to the most loaded expert of any block, relative to an even load: 1 for an even
    load, the number of experts divided by those that a token chooses if it got all."""
    expert_load_entropy: float
    """Entropy of the load divided by that of an even load, averaged over blocks. 1: every expert
    gets equally many tokens. The smaller, the fewer experts do the work: ln k / ln E if k of E
    experts share it evenly and the others get nothing (4 of 8 experts: 0.67)."""
    max_attention_logit: float
    """Largest attention logit (scaled product of a query and a key) of any head in this step; null
    where it was not measured: see `train.qk_clip` and `log.attention_logits_every`."""
    refreshes_done: int
    """Eigenbases refreshed in this step, on all ranks."""
    refreshes_skipped: int
    """Eigenbases not refreshed because of `use_adaptive_criteria` (they were still good) or because
    there were no tokens."""
    skipped: bool
    """Whether the step changed nothing because its loss or gradient was not finite or a spike, it
    was left out, or there was no token to learn (`tokens` is 0, and no loss, norm or load is
    known)."""
    skip_reason: str = ""
    """Why the step changed nothing; empty if it took place."""


class ValidationRow(TypedDict):
    """One validation: before the first step, every `train.validation_every` steps, and after the
    last."""

    step: int
    """Steps trained before it."""
    seconds: float
    """Seconds since the start of training, added up over all launches of the run."""
    validation_loss: float
    """Cross entropy on the run's own held-out set, nats per learned token; null if there was
    none."""
    validation_losses: NotRequired[dict[str, float]]
    """The same for each held-out set by name, where there are several."""
    average_validation_loss: NotRequired[float]
    """The same as `validation_loss` for the averaged weights, with `train.average_timescale`."""
    average_validation_losses: NotRequired[dict[str, float]]
    """The same for each held-out set by name, where there are several."""


class ExpertLoadRow(TypedDict):
    """The load of every expert, every `log.expert_load_every` steps."""

    step: int
    """Number of the step."""
    seconds: float
    """Seconds since the start of training, added up over all launches of the run."""
    expert_load: list[list[float]]
    """A list for each MoE block: the tokens sent to each expert, relative to an even load (1)."""


class AttentionLogitsRow(TypedDict):
    """The largest logit of every attention head, every `log.attention_logits_every` steps."""

    step: int
    """Number of the step."""
    seconds: float
    """Seconds since the start of training, added up over all launches of the run."""
    attention_logits: list[list[float]]
    """A list for each layer with attention: the largest scaled product of a query and a key in each
    head, before clipping."""


class SuspectSequence(TypedDict):
    """A sequence that a suspect step read."""

    data: str
    """The data set, and its split."""
    sequence: int
    """Number of the sequence in the split, counted from 0."""
    documents: list[int]
    """Numbers of the documents in it, counted from 0 in the split."""
    text: NotRequired[str]
    """The first tokens as text, where the run has a tokenizer."""


class SuspectRow(TypedDict):
    """A step whose loss or gradient was not finite, or with `train.spikes` a spike."""

    step: int
    """Number of the step."""
    seconds: float
    """Seconds since the start of training, added up over all launches of the run."""
    suspect: str
    """The reason."""
    origin: NotRequired[list[str]]
    """With `debug.nan`: the layer and operation where values that are not finite began, for each
    rank on which they did."""
    action: Literal["taken", "skipped"]
    """Whether the step took place."""
    sequences: list[SuspectSequence]
    """The sequences of the step, of all ranks: `data` is the data set, `sequence` the number of the
    sequence in it, `documents` the numbers of its documents in the split, both counted from 0, and
    `text` its beginning, where the run has a tokenizer."""


R = TypeVar("R", bound=Mapping[str, Any])
Row = StepRow | ValidationRow | ExpertLoadRow | AttentionLogitsRow | SuspectRow


def step_row(
    result: StepResult, progress: Progress, pace: Pace, lr: float, seconds: float, peak_bytes: int
) -> StepRow:
    """Return the row of a step that took so many seconds. `progress` and `pace`: after the step."""
    least, most, entropy = expert_load(result.counts_LE) if result.tokens else (math.nan,) * 3
    logits_AH = result.logits_AH
    return StepRow(
        step=progress.step,
        loss=result.loss,
        mtp_loss=result.mtp_loss,
        balance_loss=result.balance_loss if result.counts_LE.numel() else math.nan,
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=result.tokens,
        tokens_per_second=result.tokens / seconds,
        **vars(pace),
        seconds=progress.seconds,
        step_seconds=seconds,
        optimizer_seconds=result.optimizer_seconds,
        peak_memory_bytes=peak_bytes,
        expert_load_min=least,
        expert_load_max=most,
        expert_load_entropy=entropy,
        max_attention_logit=math.nan if logits_AH is None else float(logits_AH.max()),
        refreshes_done=result.refreshes_done,
        refreshes_skipped=result.refreshes_skipped,
        skipped=result.skipped,
        skip_reason=result.skip_reason,
    )


def validation_row(
    losses: Mapping[str, float | None],
    averaged: Mapping[str, float | None],
    progress: Progress,
) -> ValidationRow:
    """Return the row of a validation. `losses`: by held-out set, the run's own first; None without
    a label. `averaged`: those of the averaged weights; empty without."""
    numbers, of_average = (
        {name: math.nan if loss is None else loss for name, loss in each.items()}
        for each in (losses, averaged)
    )
    row: ValidationRow = {
        "step": progress.step,
        "seconds": progress.seconds,
        "validation_loss": next(iter(numbers.values())),
    }
    if len(numbers) > 1:
        row["validation_losses"] = numbers
    if of_average:
        row["average_validation_loss"] = next(iter(of_average.values()))
    if len(of_average) > 1:
        row["average_validation_losses"] = of_average
    return row


def expert_load_row(counts_LE: Tensor, progress: Progress) -> ExpertLoadRow:
    """Return the row with the load of each expert, to four decimal places."""
    load_LE = counts_LE.double() / counts_LE.double().mean(1, keepdim=True).clamp(min=1e-12)
    loads = [[round(load, 4) for load in load_E] for load_E in load_LE.tolist()]
    return {"step": progress.step, "seconds": progress.seconds, "expert_load": loads}


def attention_logits_row(logits_AH: Tensor, progress: Progress) -> AttentionLogitsRow:
    """Return the row with the largest logit of each head, to four significant digits."""
    logits = [[float(f"{logit:.4g}") for logit in logits_H] for logits_H in logits_AH.tolist()]
    return {"step": progress.step, "seconds": progress.seconds, "attention_logits": logits}


def expert_load(counts_LE: Tensor) -> tuple[float, float, float]:
    """Return the least and greatest load relative to an even load, and the mean entropy as a
    fraction of ln E, from rows per block and expert; NaN without experts."""
    if not counts_LE.numel():
        return math.nan, math.nan, math.nan
    share = counts_LE.double() / counts_LE.sum(1, keepdim=True).clamp(min=1)
    num_experts = share.shape[1]
    entropy = float(-torch.xlogy(share, share).sum(1).mean())
    return (
        float(share.min()) * num_experts,
        float(share.max()) * num_experts,
        entropy / math.log(num_experts) if num_experts > 1 else 1.0,
    )


def take_peak_memory_bytes(device: torch.device) -> int:
    """Return, on a GPU, the peak of allocated memory since the last call; otherwise the peak
    resident memory of the process so far."""
    if is_gpu(device):
        peak = int(gpu_module(device).max_memory_allocated(device))
        gpu_module(device).reset_peak_memory_stats(device)
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, and hands them to the trackers.

    Its construction cuts the file to the rows of steps up to `resume_step` (to none for a new run).
    Raises RunError if a tracker that `log` names is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None,
        log: LogConfig = LogConfig(),  # noqa: B008
        configuration: Mapping[str, Any] | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """`configuration`: values by dotted key, for the trackers; `note` shows a line."""
        self.path = run_dir / "metrics.jsonl"
        self.trackers = start_trackers(log, run_dir, resume_step, configuration or {}, note)
        if resume_step is None and (dropped := sum("loss" in row for row in read_rows(self.path))):
            note(
                f"no checkpoint in {run_dir}: begins again at step 0; the metrics of "
                f"{dropped:,} steps are dropped"
            )
        cut_rows(self.path, resume_step)
        self.file = self.path.open("a")

    def write(self, row: Row) -> None:
        text = json.dumps(asdict(row) if isinstance(row, StepRow) else row)
        # a number that is not finite becomes None
        values: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        with names_failing_disk(self.path):
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        if "suspect" in values:  # it has no measurements
            return
        numbers = numbers_of(values) if self.trackers else {}
        for tracker in self.trackers:
            tracker.write(values["step"], numbers)

    def sync(self) -> None:
        """Flush all rows to disk."""
        with names_failing_disk(self.path):
            os.fsync(self.file.fileno())
            sync(self.path.parent)

    def close(self) -> None:
        """Close the file, and complete the records of the trackers even if its disk is full."""
        try:
            with names_failing_disk(self.path):
                self.file.close()
        finally:
            for tracker in self.trackers:
                tracker.close()


def cut_rows(path: Path, resume_step: int | None) -> None:
    """Keep only the rows of steps up to `resume_step` (none for a new run) in a file of rows."""
    last = -1 if resume_step is None else resume_step
    lines = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= last]
    write_aside(path, "".join(lines))


NEEDED = (
    "seconds",
    "step_seconds",
    "optimizer_seconds",
    "tokens",
    "tokens_per_second",
    "peak_memory_bytes",
)
"""Numbers that each row of a step has, in runs of all versions."""

LOSSES = ("loss", "validation_loss", "average_validation_loss")
"""Numbers that may be null."""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the rows of a run. Raises RunError, with file and line number, for a line that is not a
    row, or lacks a number that its kind of row has."""

    def lacks(row: Mapping[str, Any]) -> str:
        losses = [name for name in LOSSES if row.get(name) is not None]
        names = NEEDED if "loss" in row else ("seconds",) if "validation_loss" in row else ()
        numbers = (*losses, *names)
        return next((name for name in numbers if not isinstance(row.get(name), int | float)), "")

    return read_rows(run / "metrics.jsonl", lacks)


def training_rows(rows: Iterable[R]) -> Iterator[R]:
    """Return the rows of training steps that were not skipped."""
    return (row for row in rows if "loss" in row and not row.get("skipped"))
