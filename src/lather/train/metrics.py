"""The measurements of a run: a row per step in `metrics.jsonl`, and in TensorBoard and Weights & Biases when asked.

Rows of training steps have all fields of `StepRow` (a number that is not finite becomes null); rows of validations have `step`, `seconds`
and `validation_loss`; rows of `log.expert_load_every` have `expert_load`, a list per MoE block. Rows up to the last checkpoint are on disk
before it is; a resumed run drops what is later and goes on, so the file is the uninterrupted run's.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lather.device import gpu_module, is_gpu
from lather.errors import RunError
from lather.files import names_full_disk, read_rows, sync, write_aside

TIME_FIELDS = ("seconds", "step_seconds", "optimizer_seconds", "tokens_per_second", "peak_memory_bytes")
"""Fields that differ between two runs of the same configuration."""


@dataclass(frozen=True)
class StepRow:
    """One training step."""

    step: int
    """1 for the first."""
    loss: float
    """Cross entropy, nats per token, mean over the step."""
    balance_loss: float
    """Load-balancing loss, mean over the MoE blocks, coefficient divided out; 1 is even."""
    lr: float
    """Learning rate of this step."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    tokens: int
    """Tokens trained on in this step."""
    tokens_per_second: float
    """Tokens per second of this step."""
    seconds: float
    """Since the start of training, over all processes that worked on the run."""
    step_seconds: float
    """Seconds of this step."""
    optimizer_seconds: float
    """Seconds of this step in the optimizer."""
    peak_memory_bytes: int
    """On a GPU the most allocated there since the row before, else the most the process ever had resident."""
    expert_load_min: float
    """Rows of the least used expert of any block, as a share of the even load."""
    expert_load_max: float
    """Rows of the most used expert of any block, as a share of the even load."""
    expert_load_entropy: float
    """Entropy of the load, mean over blocks, as a share of the even load's."""
    refreshes_done: int
    """Eigenbases refreshed in this step, on all ranks together."""
    refreshes_skipped: int
    """Eigenbases left alone by the criterion or for want of tokens."""
    skipped: bool
    """Loss or gradient was not finite, and nothing was changed."""


def expert_load(counts_LE: Tensor) -> tuple[float, float, float]:
    """Least and greatest load as shares of the even load, and mean entropy as a share of ln E, from rows per block and expert."""
    if not counts_LE.numel():
        return 1.0, 1.0, 1.0
    share = counts_LE.double() / counts_LE.sum(1, keepdim=True).clamp(min=1)
    num_experts = share.shape[1]
    entropy = float(-torch.xlogy(share, share).sum(1).mean())
    return float(share.min()) * num_experts, float(share.max()) * num_experts, entropy / math.log(num_experts) if num_experts > 1 else 1.0


def load_per_expert(counts_LE: Tensor) -> list[list[float]]:
    """Each expert's rows as a share of its block's even load, to four digits."""
    load_LE = counts_LE.double() / counts_LE.double().mean(1, keepdim=True).clamp(min=1e-12)
    return [[round(load, 4) for load in load_E] for load_E in load_LE.tolist()]


def take_peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the most that was allocated there since the last call, else the most memory that the process ever had resident."""
    if is_gpu(device):
        peak = int(gpu_module(device).max_memory_allocated(device))
        gpu_module(device).reset_peak_memory_stats(device)
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and to the other places asked for.

    On construction the file is cut to the rows of steps up to `resume_step` (none for a fresh run).
    """

    def __init__(self, run_dir: Path, resume_step: int | None, *, tensorboard: bool = False, wandb_project: str = "") -> None:
        self.path = run_dir / "metrics.jsonl"
        cut_rows(self.path, resume_step)
        self.file = self.path.open("a")
        self.sinks: list[_TensorBoard | _Wandb] = []
        if tensorboard:
            self.sinks.append(_TensorBoard(run_dir, resume_step))
        if wandb_project:
            self.sinks.append(_Wandb(run_dir, wandb_project))

    def write(self, row: StepRow | dict[str, Any]) -> None:
        values = asdict(row) if isinstance(row, StepRow) else row
        values = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        with names_full_disk(self.path):
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        for sink in self.sinks:
            sink.write(_scalars(values))

    def sync(self) -> None:
        """Have all rows on disk."""
        os.fsync(self.file.fileno())
        sync(self.path.parent)

    def close(self) -> None:
        with names_full_disk(self.path):
            self.file.close()
        for sink in self.sinks:
            sink.close()


def _scalars(values: dict[str, Any]) -> dict[str, Any]:
    """With one entry for each number of `expert_load`: `expert_load/block/expert`."""
    loads = values.get("expert_load", [])
    flat = {f"expert_load/{block}/{expert}": load for block, loads_E in enumerate(loads) for expert, load in enumerate(loads_E)}
    return {**{key: value for key, value in values.items() if key != "expert_load"}, **flat}


def cut_rows(path: Path, resume_step: int | None) -> None:
    """Leave the rows of steps up to `resume_step` (none for a fresh run) in a file of rows."""
    kept = [] if resume_step is None else [row for row in read_rows(path) if row["step"] <= resume_step]
    write_aside(path, "".join(json.dumps(row) + "\n" for row in kept))


def training_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of training steps that changed something."""
    return (row for row in rows if "loss" in row and not row.get("skipped"))


class _TensorBoard:
    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def write(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if key != "step" and value is not None:
                self.writer.add_scalar(key, value, values["step"])

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """A run of Weights & Biases with an id of its own in the run directory, so that a resumed run continues it."""

    def __init__(self, run_dir: Path, project: str) -> None:
        try:
            import wandb
        except ImportError:
            raise RunError("log.wandb_project is set, but wandb is not installed: pip install 'lather[wandb]'") from None
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(wandb.util.generate_id())
        self.run = wandb.init(project=project, id=id_file.read_text(), name=run_dir.name, dir=str(run_dir), resume="allow")

    def write(self, values: dict[str, Any]) -> None:
        self.run.log({key: value for key, value in values.items() if key != "step"}, step=values["step"])

    def close(self) -> None:
        self.run.finish()
