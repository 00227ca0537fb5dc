"""The number of sequences of each step of a run, which may grow in its first steps ("batch-size
warm-up").

While it grows the batch is 1, 2, 3, ... times the first one, so that every batch can be divided
among ranks and micro-batches as the first one is; each size lasts for equally many steps, or one
more or less. The sizes depend on the step alone: a resumed run needs no further state.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from lather.data.order import floor_sum


@dataclass(frozen=True)
class BatchSizes:
    """Sequences of a step, on all ranks, as a function of the step, which counts from 1."""

    full: int
    """Sequences of a step after the growth."""
    first: int = 0
    """Sequences of step 1, a divisor of `full`, if the batch grows."""
    growth_steps: int = 0
    """Steps with less than `full`; 0: the batch does not grow."""

    @property
    def _num_stages(self) -> int:
        return self.full // self.first - 1 if self.growth_steps else 0

    def of(self, step: int) -> int:
        """Return the sequences of a step."""
        if step > self.growth_steps:
            return self.full
        return self.first * (1 + (step - 1) * self._num_stages // self.growth_steps)

    def steps_of(self, num_sequences: int) -> int:
        """Return the least number of steps, at least 1, with so many sequences."""
        return max(1, bisect_left(range(2**62), num_sequences, key=lambda n: self.before(n + 1)))

    def before(self, step: int) -> int:
        """Return the sequences of all steps before `step`."""
        growing = min(step - 1, self.growth_steps)
        multiples = growing + floor_sum(growing, max(1, self.growth_steps), self._num_stages, 0)
        return self.first * multiples + self.full * (step - 1 - growing)
