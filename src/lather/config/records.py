"""The sections of the configuration on what a run writes beside its results: `[checkpoint]`,
`[log]` and `[profile]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lather.config.rule_fields import check_ranges
from lather.config.step_ranges import StepRanges
from lather.errors import require
from lather.optim.options import Count, NonNegative, at_least

Number = Annotated[int, at_least(0)]


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and which stay."""

    every: Count = 100
    """Steps between checkpoints; a checkpoint is also saved at the end, and at a signal."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: Number = 0
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss (see train.patience_on), which is
    saved after each validation that is better than all before."""
    asynchronous: bool = False
    """Write checkpoints while training continues, from a copy in CPU memory; it is as large as the
    rank's weights and optimizer state."""

    def __post_init__(self) -> None:
        check_ranges(self, "checkpoint.")
        constraint = f"a multiple of checkpoint.every ({self.every}), or 0"
        fits = self.keep_every % self.every == 0
        require(fits, "checkpoint.keep_every", self.keep_every, constraint)


@dataclass(frozen=True)
class ProfileConfig:
    """A profile of some training steps: where their time goes, by torch's profiler."""

    steps: StepRanges = ""
    """Steps to profile, such as 10:13, both included; each range is a profile. A trace for each
    rank, and a picture of where the time went, are written to the run's folder profile. The
    profiler makes these steps longer. Empty: none."""
    memory: bool = False
    """On a GPU also record every allocation in these steps, and write a snapshot for each rank.
    Without effect on a CPU."""

    def __post_init__(self) -> None:
        check_ranges(self, "profile.")


@dataclass(frozen=True)
class LogConfig:
    """Progress display, records besides metrics.jsonl, and the sample at the end."""

    every: Count = 10
    """Steps between progress lines if the output is not a terminal."""
    expert_load_every: Number = 100
    """Steps between records of every expert's load in metrics.jsonl; 0: none."""
    attention_logits_every: Number = 0
    """Steps between records of every attention head's largest logit in metrics.jsonl; the largest
    of all is measured in these steps, and in all steps with train.qk_clip. 0: none."""
    timeline_every: Number = 0
    """Steps between records in timeline.jsonl of when each rank did what, for `lather plot
    --schedule`; 0: none."""
    peak_flops: NonNegative = 0.0
    """Peak flops per second of a device, of which MFU is a share; 0: known from a GPU's name, and
    else no MFU is shown."""
    memory_plan: Literal["auto", "always", "never"] = "auto"
    """Plan the run's memory while it starts, report before the first step whether it fits, and
    write planned and measured bytes to memory.json; auto: on GPUs only."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run directory."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (extra `wandb`)."""
    mlflow_experiment: str = ""
    """Also log to this MLflow experiment (extra `mlflow`), at MLFLOW_TRACKING_URI or, without it,
    in the folder mlruns beside the run directory."""
    picture: bool = True
    """Draw loss.png at the end, and write report.html, a page of the run."""
    sample_prompt: str = ""
    """Text that the sample at the end continues; empty: the first words of the held-out text."""
    sample_tokens: Number = 160
    """Tokens of the sample at the end; 0: no sample."""

    def __post_init__(self) -> None:
        check_ranges(self, "log.")
