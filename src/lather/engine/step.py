"""One optimizer step: forward and backward passes of the micro-batches, gradient norm, clipping,
update."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.config.optim import OptimConfig
from lather.data.batches import Batch
from lather.device import Read, gpu_module, is_gpu, read
from lather.engine.engine import BatchResult, Engine
from lather.engine.optimizer import LR_FACTOR
from lather.errors import ConfigError
from lather.optim import MatrixOptimizer
from lather.optim.engine.gradients import GradientNorms
from lather.parallel.local_parameters import clip_, squared_norm

REFRESHES = ("refreshes_done", "refreshes_skipped")
"""Counters of an optimizer, and fields of a step's result."""


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return `optim.lr` at step 1, 2, ..., `steps`: linear warm-up, then the schedule down to
    `min_lr_ratio` at the last step."""
    if step <= config.warmup_steps:
        return config.peak_lr * step / config.warmup_steps
    start = (
        config.warmup_steps
        if config.schedule != "wsd"
        else max(config.warmup_steps, round(steps * (1 - config.decay_fraction)))
    )
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    linear = 1 - progress
    shape = {
        "constant": 1.0,
        "linear": linear,
        "wsd": linear,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[config.schedule]
    return config.peak_lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def pick_device(name: str) -> torch.device:
    """Return the device that `train.device` names. Raises ConfigError if it does not exist."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda', but there is no CUDA device: use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class StepResult(BatchResult):
    """The result of one step."""

    grad_norm: float
    optimizer_seconds: float
    refreshes_done: int
    """Refreshes since the previous step; with `optim.async_refresh` that step started them."""
    refreshes_skipped: int
    skipped: bool
    """Whether the step changed nothing."""


class TrainStep:
    """Runs optimizer steps on a mesh; each rank calls it with its share of the batch."""

    def __init__(self, engine: Engine, optimizer: MatrixOptimizer, max_grad_norm: float) -> None:
        """`optimizer`: for `engine.parameters`; `max_grad_norm`: 0 does not clip."""
        self.engine, self.optimizer, self.max_grad_norm = engine, optimizer, max_grad_norm
        if engine.mesh.pp > 1:
            engine.fill_gaps(optimizer.defer_refreshes())
        self._counters = optimizer.counters

    def __call__(self, batch: Batch, lr: float) -> StepResult:
        """`batch`: this rank's share of the global batch; `lr`: `optim.lr` at this step, which
        groups multiply by their factors.

        A step whose loss or gradient is not finite changes nothing on any rank, and neither does
        one without labels, whose loss and norm are NaN and which computes nothing.
        """
        num_labels, num_tokens = self.engine.counts_of_all(batch)
        if not num_labels:
            result = self.engine.without_labels()
            return StepResult(
                **vars(result),
                **self._new_refreshes(),
                grad_norm=math.nan,
                optimizer_seconds=0.0,
                skipped=True,
            )
        batch = replace(batch, labels_of_all=num_labels, tokens_of_all=num_tokens)
        result, norm, norms = self._gradients(batch)
        finite = math.isfinite(result.loss + norm.item())
        start = (
            time.perf_counter()
        )  # a GPU is idle now, since the host has just waited for the gradients
        if finite:
            if self.max_grad_norm:
                clip_(self.engine.parameters.gradients(), norm, self.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get(LR_FACTOR, 1.0)
            self.optimizer.step(norms=norms)
            self.engine.balance(result.counts_LE)
        seconds = self._now() - start
        self.engine.parameters.clear_gradients()
        refreshes = self._new_refreshes()
        return StepResult(
            **vars(result),
            **refreshes,
            grad_norm=norm.item(),
            optimizer_seconds=seconds,
            skipped=not finite,
        )

    def _gradients(self, batch: Batch) -> tuple[BatchResult, Tensor, GradientNorms | None]:
        """Run the forward and backward pass; return its result, the norm of all gradients on the
        CPU, and the norms that the optimizer needs, with one wait for the device."""
        engine, unread = self.engine, self.engine.launch_gradients(batch)
        norms = self.optimizer.measure_gradients()
        square = squared_norm(
            engine.parameters, engine.mesh, *([] if norms is None else [norms.of])
        )
        result, (square,), own = engine.read(
            unread, sums=square[None], own=None if norms is None else norms.values
        )
        if norms is not None:
            norms.values = own
        return result, square.sqrt().to(engine.parameters.norm_dtype), norms

    def _new_refreshes(self) -> dict[str, Any]:
        """Return how many refreshes all ranks have done and skipped since the last call."""
        before, self._counters = self._counters, self.optimizer.counters
        new = [self._counters[name] - before[name] for name in REFRESHES]
        if self.engine.mesh.size > 1:
            total = torch.tensor(new, device=self.engine.mesh.device)
            dist.all_reduce(total)
            new = read(total, Read.COUNTERS).tolist()
        return dict(zip(REFRESHES, new, strict=True))

    def _now(self) -> float:
        if is_gpu(
            self.engine.mesh.device
        ):  # wait for this stream only: refreshes may continue on others
            gpu_module(self.engine.mesh.device).current_stream(
                self.engine.mesh.device
            ).synchronize()
        return time.perf_counter()
