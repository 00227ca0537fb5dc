"""Going back to a checkpoint after a spike, with `train.spikes = "roll_back"`: the run resumes
there as a run does that was killed, and leaves out the steps from there to the spike, which
`train.skip_steps` then names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lather.config.config import Config
from lather.config.step_ranges import with_range
from lather.files import optional_file
from lather.train.diverged import DivergedError
from lather.train.run_dir import RunData

FILE = "spikes.jsonl"
"""The rows of steps that a run has left behind, which `metrics.jsonl` no longer has."""


@dataclass(frozen=True)
class RolledBack:
    """How a run goes on after it went back; before it has, with what it was given."""

    skip_steps: str
    """The steps that it leaves out, as `train.skip_steps`."""
    checkpoint: int = -1
    """The step of the checkpoint to which it went back last; -1: to none yet."""
    times: int = 0
    """How often it went back to that checkpoint, one time after the other."""
    data: RunData | None = None
    """The data sets that it has opened, whose texts may have changed since; None: none yet."""

    def again(self, checkpoint: int, spike: int, data: RunData) -> RolledBack:
        """Return how the run goes on from a checkpoint after a spike at a later step."""
        times = self.times + 1 if checkpoint == self.checkpoint else 1
        left_out = with_range(self.skip_steps, checkpoint + 1, spike)
        return RolledBack(left_out, checkpoint, times, data)


def keep_rows(
    run_dir: Path, rows: Iterable[Mapping[str, Any]], checkpoint: int, note: Callable[[str], None]
) -> None:
    """Append the rows of metrics after a checkpoint, to which the run goes back, to `FILE`."""
    later = [{**row, "rolled_back_to": checkpoint} for row in rows if row["step"] > checkpoint]
    path = run_dir / FILE
    with optional_file(path, note), path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in later)


def went_back_in_vain(config: Config, last: RolledBack) -> DivergedError:
    """Return the error after more than `train.max_skipped_steps` returns to one checkpoint."""
    return DivergedError(
        f"the run has gone back to step {last.checkpoint} {last.times - 1} times "
        f"(train.max_skipped_steps), and each time a spike came before the next checkpoint: if the "
        f"data have changed for good, give --train.spikes off; if not, lower optim.lr (now "
        f"{config.optim.peak_lr:g}), or save checkpoints more often (checkpoint.every, now "
        f"{config.checkpoint.every})"
    )
