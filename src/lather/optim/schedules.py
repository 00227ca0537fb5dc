"""Ready-made intervals for `precondition_frequency`: refresh often while bases turn fast, seldom once they are settled.

Each is a callable of the 1-based step that gives the steps between refreshes. Like the functions of torch's learning-rate schedulers they
are not part of `state_dict`: the optimizer that loads keeps its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class _Ramp:
    min_frequency: int
    """Steps between refreshes up to `start_step`."""
    max_frequency: int
    """Steps between refreshes at the end."""
    num_steps: int
    """Steps that the way from one to the other takes."""
    start_step: int = 0
    """The step at which it begins."""

    def __post_init__(self) -> None:
        least = {"min_frequency": 1, "max_frequency": self.min_frequency, "num_steps": 1, "start_step": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                constraint = "at least min_frequency" if name == "max_frequency" else f"an integer >= {low}"
                raise ValueError(f"{name}={value!r} is not valid: give {constraint}")

    def __call__(self, step: int) -> int:
        share = min(1.0, max(0.0, (step - self.start_step) / self.num_steps))
        return self.min_frequency + round(self._bent(share) * (self.max_frequency - self.min_frequency))

    def _bent(self, share: float) -> float:
        """How far the interval has come after this share of `num_steps`, 0 to 1."""
        return share


@dataclass(frozen=True)
class LinearFrequency(_Ramp):
    """From `min_frequency` to `max_frequency` along a straight line of `num_steps`, from `start_step` on."""


@dataclass(frozen=True)
class CosineFrequency(_Ramp):
    """From `min_frequency` to `max_frequency` along half a cosine of `num_steps`, from `start_step` on."""

    def _bent(self, share: float) -> float:
        return (1 - math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class StepFrequency(_Ramp):
    """Doubles from `min_frequency` every `num_steps` from `start_step` on, up to `max_frequency`."""

    def __call__(self, step: int) -> int:
        doublings = max(0, (step - self.start_step) // self.num_steps)
        return min(self.max_frequency, self.min_frequency << min(doublings, 32))
