"""Functions for `precondition_frequency`: refresh often while bases change fast, and less often
when they have settled.

Each maps the step, which counts from 1, to the number of steps between refreshes. Like the
functions of torch's learning-rate schedulers they are not part of `state_dict`: an optimizer that
loads a state keeps its function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lather.optim.plain import as_count, is_count


@dataclass(frozen=True)
class _Ramp:
    min_frequency: int
    """Steps between refreshes up to `start_step`."""
    max_frequency: int
    """Steps between refreshes at the end."""
    num_steps: int
    """Number of steps from `min_frequency` to `max_frequency`."""
    start_step: int = 0
    """Step at which the increase begins."""

    def __post_init__(self) -> None:
        least = {"min_frequency": 1, "max_frequency": None, "num_steps": 1, "start_step": 0}
        for name, low in least.items():
            value = as_count(getattr(self, name))
            object.__setattr__(self, name, value)
            if not is_count(value, self.min_frequency if low is None else low):
                constraint = (
                    "at least min_frequency" if name == "max_frequency" else f"an integer >= {low}"
                )
                raise ValueError(f"{name}={value!r} is not valid: give {constraint}")

    def __call__(self, step: int) -> int:
        share = min(1.0, max(0.0, (as_count(step) - self.start_step) / self.num_steps))
        return self.min_frequency + round(
            self._bent(share) * (self.max_frequency - self.min_frequency)
        )

    def _bent(self, share: float) -> float:
        """Return how far the interval has increased, 0 to 1, after this fraction of `num_steps`."""
        return share


@dataclass(frozen=True)
class LinearFrequency(_Ramp):
    """Increases linearly from `min_frequency` to `max_frequency` over `num_steps`, from
    `start_step` on."""


@dataclass(frozen=True)
class CosineFrequency(_Ramp):
    """Increases from `min_frequency` to `max_frequency` along half a cosine over `num_steps`, from
    `start_step` on."""

    def _bent(self, share: float) -> float:
        return (1 - math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class StepFrequency(_Ramp):
    """Starts at `min_frequency` and doubles every `num_steps` from `start_step` on, up to
    `max_frequency`."""

    def __call__(self, step: int) -> int:
        doublings = max(0, (as_count(step) - self.start_step) // self.num_steps)
        return min(self.max_frequency, self.min_frequency << min(doublings, 32))
