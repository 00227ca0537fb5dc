"""The error that ends a run whose steps are skipped one after the other."""

from __future__ import annotations

from lather.checkpoint.folder import Progress
from lather.config.config import Config
from lather.engine.step_reading import SPIKE, StepResult


class DivergedError(RuntimeError):
    """Too many consecutive steps had a loss or gradient that was not finite, or a spike."""


def diverged(config: Config, progress: Progress, last: StepResult) -> DivergedError:
    """Return the error after `train.max_skipped_steps` skipped steps, the `last` one included."""
    text = f"{progress.skipped_in_a_row} steps in a row, the last of them step {progress.step}, "
    rate = f"lower optim.lr (now {config.optim.peak_lr:g})"
    fork = (
        "continue from an earlier checkpoint in another folder, with --fork-from "
        f"{config.run_dir}@STEP and --run-dir"
    )
    if last.skip_reason == SPIKE:
        return DivergedError(
            f"{text}were skipped, this one as a spike: if the data have changed for good, give "
            f"--train.spikes off; if the loss rose before, {rate}, and {fork}"
        )
    return DivergedError(
        f"{text}had a loss or gradient that was not finite: {rate} or raise optim.warmup_steps, "
        f"and {fork}, or start a new run"
    )
