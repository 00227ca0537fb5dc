"""Means over seeds, with intervals of 95 % after Student."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t by degrees of freedom, 1 to 10."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and half the width of its 95 % interval."""

    value: float
    half_width: float
    """Half the width of the interval; NaN for a single seed."""
    count: int
    finite: int
    """How many of the values are finite."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean, which is infinite if any value is. Raises ValueError without values."""
        count = len(values)
        if not count:
            raise ValueError("a mean needs at least one value")
        finite = sum(map(math.isfinite, values))
        if finite < count:
            return cls(math.inf, math.nan, count, finite)
        quantile = STUDENT[min(count - 1, len(STUDENT) - 1)]
        spread = statistics.stdev(values) / math.sqrt(count) if count > 1 else 0.0
        return cls(statistics.fmean(values), quantile * spread, count, finite)

    def text(self, digits: int, signed: bool = False) -> str:
        shown = f"{self.value:+.{digits}f}" if signed else f"{self.value:.{digits}f}"
        return shown if math.isnan(self.half_width) else f"{shown} ± {self.half_width:.{digits}f}"
