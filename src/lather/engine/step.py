"""One optimizer step: forward and backward passes of the micro-batches, gradient norm, clipping,
update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from lather.config.kind_config import KINDS
from lather.config.optim import OptimConfig
from lather.data.batches import Batch
from lather.device import Read, gpu_module, is_gpu, read
from lather.engine.engine import Engine
from lather.engine.optimizer import KIND, LR_FACTOR
from lather.engine.qk_clip import clip_logits_
from lather.engine.step_reading import LEFT_OUT, NOT_FINITE, SPIKE, StepReading, StepResult
from lather.errors import ConfigError
from lather.optim import MatrixOptimizer
from lather.optim.batched.gradients import Inspection
from lather.parallel.local_parameters import clip_factor
from lather.profiled import profiled

REFRESHES = ("refreshes_done", "refreshes_skipped")
"""Counters of an optimizer: refreshes since its construction."""
Rates = float | Mapping[str, float]
"""`optim.lr` at a step: by one schedule, or by that of each kind of parameters."""


def learning_rate(step: int, config: OptimConfig, steps: int, kind: str = "") -> float:
    """Return `optim.lr` at step 1, 2, ..., `steps`, by the schedule of a kind of parameters or by
    that of `[optim]`."""
    return config.schedule_of(kind).rate(config.peak_lr, step, steps)


def learning_rates(step: int, config: OptimConfig, steps: int) -> dict[str, float]:
    """Return `learning_rate` at a step for each kind of parameters, and under "" for `[optim]`."""
    return {kind: learning_rate(step, config, steps, kind) for kind in ("", *KINDS)}


def pick_device(name: str) -> torch.device:
    """Return the device that `train.device` names. Raises ConfigError if it does not exist."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda', but there is no CUDA device: use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class TrainStep:
    """Runs optimizer steps on a mesh; each rank calls it with its share of the batch."""

    def __init__(
        self, engine: Engine, optimizer: MatrixOptimizer, max_grad_norm: float, qk_clip: float = 0.0
    ) -> None:
        """`optimizer`: for `engine.parameters`; `max_grad_norm`: 0 does not clip; `qk_clip`: the
        largest logit of an attention head, 0 does not clip."""
        self.engine, self.optimizer = engine, optimizer
        self.max_grad_norm, self.qk_clip = max_grad_norm, qk_clip
        if engine.mesh.pp > 1:
            engine.fill_gaps(optimizer.defer_refreshes())
        self._counters = optimizer.counters
        self.is_spike: Callable[[StepResult], bool] = lambda result: False
        """Returns whether a step with a finite loss and norm is to change nothing, the same on all
        ranks; called once for each."""

    def __call__(self, batch: Batch, lr: Rates, *, with_logits: bool = False) -> StepResult:
        """`batch`: this rank's share of the global batch; `lr`: `optim.lr` at this step, which
        groups multiply by their factors, or that of each kind; `with_logits`: measure the largest
        attention logits also without `qk_clip`.

        A step whose loss or gradient is not finite, or a spike, changes nothing on any rank. A step
        without labels computes and changes nothing; its loss and norm are NaN.
        """
        num_labels, num_tokens = self.engine.shares.counts_of_all(batch)
        if not num_labels:
            return self._with_refreshes(self.engine.without_labels())
        batch = replace(batch, labels_of_all=num_labels, tokens_of_all=num_tokens)
        with_logits = with_logits or self.qk_clip > 0
        return self.update(self.engine.launch_gradients(batch, with_logits=with_logits), lr)

    def leave_out(self) -> StepResult:
        """Take no step and compute nothing; return the result of a step without labels."""
        return self._with_refreshes(replace(self.engine.without_labels(), skip_reason=LEFT_OUT))

    def update(self, reading: StepReading, lr: Rates) -> StepResult:
        """Read the results of the passes, and of the gradients in `engine.parameters`, with one
        wait for the device; take the optimizer's step of the clipped gradients, and free them."""
        result, norms = self._read(reading)
        reason = NOT_FINITE
        if math.isfinite(result.loss + result.grad_norm):
            reason = SPIKE if self.is_spike(result) else ""
        # a GPU is idle now, since the host has just waited for the gradients
        start = time.perf_counter()
        if not reason:
            self._change(result, norms, lr)
        seconds = self._now() - start
        self.engine.parameters.clear_gradients()
        return self._with_refreshes(replace(result, optimizer_seconds=seconds, skip_reason=reason))

    @profiled("optimizer")
    def _change(self, result: StepResult, norms: Inspection, lr: Rates) -> None:
        """Clip the gradients, and change the weights and the routers' biases."""
        parameters, factor = self.engine.parameters, 1.0
        if self.max_grad_norm:
            norm = torch.tensor(result.grad_norm, dtype=parameters.norm_dtype)
            factor = clip_factor(norm, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            of_kind = lr[group[KIND]] if isinstance(lr, Mapping) else lr
            group["lr"] = of_kind * group.get(LR_FACTOR, 1.0)
        self.optimizer.step(norms=norms, gradient_factor=factor)
        self.engine.balance(result.counts_LE)
        if self.qk_clip and result.logits_AH is not None:
            state, logits_AH = self.optimizer.state, result.logits_AH
            clip_logits_(self.engine.part, parameters, state, logits_AH, self.qk_clip)

    @profiled("read")
    def _read(self, reading: StepReading) -> tuple[StepResult, Inspection]:
        """Add the gradients to a reading; return its result, and what the optimizer needs."""
        norms = self.optimizer.measure_gradients()
        reading.add_gradients(norms)
        result, values = reading.read()
        return result, norms.on_host(values)

    def _with_refreshes(self, result: StepResult) -> StepResult:
        """Return a result with the refreshes that all ranks have done and skipped since the last
        step."""
        before, self._counters = self._counters, self.optimizer.counters
        done, skipped = (self._counters[name] - before[name] for name in REFRESHES)
        if self.engine.mesh.size > 1:
            total = torch.tensor((done, skipped), device=self.engine.mesh.device)
            with profiled("wait"):
                dist.all_reduce(total)
            done, skipped = read(total, Read.COUNTERS).tolist()
        return replace(result, refreshes_done=done, refreshes_skipped=skipped)

    def _now(self) -> float:
        # wait for this stream only: refreshes may continue on others
        if is_gpu(self.engine.mesh.device):
            gpu_module(self.engine.mesh.device).current_stream(
                self.engine.mesh.device
            ).synchronize()
        return time.perf_counter()
