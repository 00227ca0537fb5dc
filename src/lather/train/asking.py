"""Requests that a run obeys while it trains, and the wall-clock limit of a launch, `train.minutes`.

A batch system kills what outlives its time, so a launch ends before a step that might not leave
room for the last checkpoint: when the time since its start, the longest step so far (with its
validation) and the longest checkpoint so far together exceed the limit. The first step of a launch
does not count once there is a second, since it compiles and allocates. Before the first checkpoint
of a launch the time that one takes is estimated from its bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SLOW_DISK = 100e6
"""Bytes that a rank is assumed to write per second, before a checkpoint was measured."""
ALIKE_SECONDS = 1.0
"""Seconds after a checkpoint that was asked for, within which the same request is expected from
other ranks and from the launcher."""


@dataclass(frozen=True)
class Asking:
    """Requests that a run obeys while it trains. On a mesh, what is asked of any rank is asked of
    all."""

    stop: Callable[[], bool] = lambda: False
    """Returns, between steps, whether to save a checkpoint and end."""
    save: Callable[[], float] = lambda: 0.0
    """Returns when a checkpoint was last asked for, in seconds of `time.monotonic`; 0: never."""
    started: float = field(default_factory=time.monotonic)
    """When the launch started, in seconds of `time.monotonic`; `train.minutes` counts from here."""


class TimeLimit:
    """The limit of a launch, by the clock of one rank."""

    def __init__(self, minutes: float, started: float, checkpoint_bytes: int) -> None:
        """`minutes`: 0 for no limit; `started`: when the launch started, in seconds of
        `time.monotonic`; `checkpoint_bytes`: those that the rank writes to a checkpoint, about."""
        self._deadline = started + 60 * minutes if minutes else math.inf
        self._estimate = checkpoint_bytes / SLOW_DISK
        self._longest_step = 0.0
        self._num_steps = 0

    def took_step(self, seconds: float) -> None:
        """Take account of the seconds of a step, without those of checkpoints."""
        self._longest_step = seconds if self._num_steps < 2 else max(self._longest_step, seconds)
        self._num_steps += 1

    def is_reached(self, longest_save: float) -> bool:
        """Return whether another step and a checkpoint might not fit. `longest_save`: seconds of
        the longest checkpoint of this launch; 0 if there was none."""
        if self._deadline == math.inf:
            return False
        room = self._longest_step + (longest_save or self._estimate)
        return time.monotonic() + room > self._deadline
