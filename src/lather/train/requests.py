"""Requests that a run obeys while it trains, and the wall-clock limit of a launch, `train.minutes`.

A batch system kills a job that outlives its time, so a launch ends before a step that might not
leave room for the last checkpoint: when the time since its start, the longest step so far (with its
validation) and the longest checkpoint so far together exceed the limit. The first step of a launch
does not count once there is a second, since it compiles and allocates. Before the first checkpoint
of a launch its time is estimated from its bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SLOW_DISK = 100e6
"""Bytes that a rank is assumed to write per second, before a checkpoint was measured."""
SAME_REQUEST_SECONDS = 1.0
"""Seconds after a requested checkpoint within which the same request may arrive from other ranks
and from the launcher."""


@dataclass(frozen=True)
class RunRequests:
    """Reads requests between the steps of a run. On a mesh, all ranks obey what any rank reads."""

    stop: Callable[[], bool] = lambda: False
    """Returns whether to save a checkpoint and end."""
    save: Callable[[], float] = lambda: 0.0
    """Returns when a checkpoint was last requested, in seconds of `time.monotonic`; 0: never."""
    started: float = field(default_factory=time.monotonic)
    """When the launch started, in seconds of `time.monotonic`; `train.minutes` counts from here."""


class TimeLimit:
    """The limit of a launch, by the clock of one rank."""

    def __init__(self, minutes: float, started: float, checkpoint_bytes: int) -> None:
        """`minutes`: 0 for no limit; `started`: when the launch started, in seconds of
        `time.monotonic`; `checkpoint_bytes`: about what the rank writes to a checkpoint."""
        self._deadline = started + 60 * minutes if minutes else math.inf
        self._estimate = checkpoint_bytes / SLOW_DISK
        self._longest_step = 0.0
        self._num_steps = 0

    def count_step(self, seconds: float) -> None:
        """Count a step that took so many seconds, without those of checkpoints."""
        self._longest_step = seconds if self._num_steps < 2 else max(self._longest_step, seconds)
        self._num_steps += 1

    def is_reached(self, longest_save: float) -> bool:
        """Return whether another step and a checkpoint might not fit. `longest_save`: seconds of
        the longest checkpoint of this launch; 0 if there was none."""
        room = self._longest_step + (longest_save or self._estimate)
        return time.monotonic() + room > self._deadline
