"""Computes how far a run is after a step: tokens and epochs, the share of the devices' peak rate,
and the time left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lather.config.config import Config
from lather.data.batches import Batches
from lather.device import stated_peak_flops
from lather.engine.trained_parameters import outline, train_only, trained_parameters
from lather.models.model_flops import flops_per_token
from lather.parallel.mesh import Mesh

RECENT = 100
"""Steps of which the mean decides how fast the rest of the run is; several refreshes of bases are
among them."""


@dataclass(frozen=True)
class Pace:
    """How far a run is after a step (`lather.train.metrics.StepRow`)."""

    total_tokens: int
    epoch: float
    mfu: float
    seconds_left: float


class PaceMeter:
    """Computes the pace of a run from its batches, so that a resumed run goes on counting, and from
    the steps of this process."""

    def __init__(
        self,
        config: Config,
        batches: Batches,
        mesh: Mesh,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches, self._steps = batches, config.train.steps
        self._length = config.train.sequence_length
        self._flops_per_token = 0.0
        self._peak = config.log.peak_flops
        if not self._peak and (stated := stated_peak_flops(mesh.device)):
            self._peak = stated[0]
        if self._peak:
            model = outline(config)
            train_only(model, trained_parameters(config).names)
            self._flops_per_token = flops_per_token(model, config.model, self._length)
        self._peak *= mesh.size
        self._time_left = TimeLeft(self._sequences(self._steps), now)

    def after(self, step: int, num_tokens: int, seconds: float) -> Pace:
        """Return the pace after a step that took so many seconds. `num_tokens`: its inputs, without
        padding; 0 if it computed nothing."""
        done = self._sequences(step)
        flops = self._flops_per_token * num_tokens
        return Pace(
            total_tokens=done * self._length,
            epoch=max(self._batches.order.passes(done)),
            mfu=flops / seconds / self._peak if self._peak else math.nan,
            seconds_left=self._time_left.after(done, seconds, computed=num_tokens > 0),
        )

    def _sequences(self, step: int) -> int:
        """Return the sequences of all steps up to `step`."""
        return self._batches.sizes.before(step + 1)


class TimeLeft:
    """Estimates the time left of a run from the steps of this process after its first, which
    compiles and fills caches: the mean of the recent steps for each sequence, and what went by
    between steps (validations, checkpoints) for each sequence so far."""

    def __init__(self, sequences: int, now: Callable[[], float]) -> None:
        """`sequences`: those of the whole run."""
        self._sequences, self._now = sequences, now
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        """Sequences and seconds of steps."""
        self._in_steps = 0.0
        self._first: tuple[int, float] | None = None
        """Sequences and time at the end of the first step."""
        self._last = self._left_out = 0

    def after(self, done: int, seconds: float, *, computed: bool = True) -> float:
        """Return the seconds left after a step that took so many seconds and ends now. `done`:
        sequences of all steps so far; `computed`: whether this one did not leave them out. NaN: not
        known yet."""
        if self._first is None:
            if computed:
                self._first, self._last = (done, self._now()), done
            return math.nan if done < self._sequences else 0.0
        if computed:
            self._recent.append((done - self._last, seconds))
        else:
            self._left_out += done - self._last
        self._last, self._in_steps = done, self._in_steps + seconds
        if not self._recent:
            return math.nan if done < self._sequences else 0.0
        first, start = self._first
        trained = done - first - self._left_out
        between = max(0.0, self._now() - start - self._in_steps) / trained
        sequences, of_recent = map(sum, zip(*self._recent, strict=True))
        return max(0, self._sequences - done) * (of_recent / sequences + between)
