"""The learning rate over the steps of a run.

With x, the elapsed fraction of the decay, the rate after the linear warm-up is

    peak * (min_lr_ratio + (1 - min_lr_ratio) * shape(x))

    constant  1                    linear  1 - x        cosine  (1 + cos(pi x)) / 2
    wsd       1 - x                1-sqrt  1 - sqrt(x)  power   (1 - x)^decay_power

where the decay of linear and cosine begins after the warm-up, and that of wsd (warm-up, stable,
decay), 1-sqrt (Hägele et al., 2024) and power, the cooldowns, `decay_fraction` of the run before
its end. A warm-up or a cooldown that is a fraction of the run takes at least one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from lather.optim.options import Positive, Range
from lather.optim.plain import is_count


def _is_warmup(value: int | float) -> bool:
    return is_count(value, 0) if isinstance(value, int) else 0 < value < 1


Shape = Literal["constant", "linear", "cosine", "wsd", "1-sqrt", "power"]
WarmupSteps = Annotated[
    int | float, Range("an integer >= 0, or a fraction of the run in (0, 1)", _is_warmup)
]
DecayFraction = Annotated[float, Range("in (0, 1]", lambda share: 0 < share <= 1)]
MinRatio = Annotated[float, Range("in [0, 1]", lambda ratio: 0 <= ratio <= 1)]

COOLDOWNS = ("wsd", "1-sqrt", "power")
"""Shapes that are constant up to the last `decay_fraction` of the run."""


@dataclass(frozen=True)
class RateSchedule:
    """The schedule of a kind of parameters; its fields are options of `[optim]`."""

    schedule: Shape
    warmup_steps: WarmupSteps
    decay_fraction: DecayFraction
    decay_power: Positive
    min_lr_ratio: MinRatio

    def rate(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate at step 1, 2, ..., `steps`."""
        warmup = self.num_warmup_steps(steps)
        if step <= warmup:
            return peak * step / warmup
        start = warmup
        if self.schedule in COOLDOWNS:
            start = max(warmup, min(round(steps * (1 - self.decay_fraction)), steps - 1))
        progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
        linear = 1 - progress
        shape = {
            "constant": 1.0,
            "linear": linear,
            "wsd": linear,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "1-sqrt": 1 - math.sqrt(progress),
            "power": linear**self.decay_power,
        }[self.schedule]
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * shape)

    def num_warmup_steps(self, steps: int) -> int:
        """Return the steps of warm-up in a run of `steps` steps."""
        if isinstance(self.warmup_steps, int):
            return self.warmup_steps
        return max(1, round(self.warmup_steps * steps))

    def describe(self, steps: int) -> str:
        """Describe the schedule of a run of `steps` steps in a few words."""
        return f"{self.schedule}, {self.num_warmup_steps(steps):,} steps of warm-up"


SCHEDULE_OPTIONS = tuple(each.name for each in fields(RateSchedule))
"""Names of the options that make a schedule."""
