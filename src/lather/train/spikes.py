"""Finds spikes of the loss and of the gradient's norm among the steps of a run.

A value is a spike if it lies further above the median of the last steps than so many deviations;
the deviation is 1.4826 times the median absolute deviation from the median, which is the standard
deviation of normally distributed values (Hampel, 1974: up to half of the values may be spikes
themselves). The norm is compared by its logarithm, in which its values spread evenly.

Spikes count among the last steps, too, whatever was done about them. So a level that has risen for
good, for example because the data have changed, is no spike any more after about half of the last
steps. A run that only notes spikes comes so far; one that skips them, or goes back, ends
before, with the defaults at the tenth (`train.max_skipped_steps`). The finite losses and
norms of all steps with labels are the whole state: a resumed run reads them from its metrics.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from lather.engine.step_reading import StepResult

LEAST = 20
"""Steps before the first that can be found to be a spike."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
LEAST_LOSS, LEAST_NORM = 0.01, 0.05
"""Least deviations: of a loss relative to the median, and of the logarithm of a norm. Values that
hardly differ would make spikes of each other."""


class SpikeWatch:
    """Compares each step with those before; the same on all ranks."""

    def __init__(self, deviations: float, window: int) -> None:
        """`deviations`: above the median, from which on a value is a spike; `window`: number of
        last steps."""
        self._deviations, self._window = deviations, window
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def values_of(self, rows: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
        """Return losses and norms of the last steps from rows of metrics."""
        last = deque[tuple[float, float]](maxlen=self._window)
        for row in rows:
            if row.get("loss") is not None and row.get("grad_norm") is not None:
                last.append((row["loss"], row["grad_norm"]))
        return list(last)

    def restore(self, values: Iterable[tuple[float, float]]) -> None:
        """Continue after steps with these losses and norms."""
        for loss, norm in values:
            self._add(loss, norm)

    def judge(self, result: StepResult) -> str:
        """Say in which way a step with a finite loss and norm is a spike; empty if it is none. It
        is one of the last steps from now on."""
        norm = _logarithm(result.grad_norm)
        spike = self._text("loss", result.loss, self._losses, result.loss, LEAST_LOSS)
        spike = spike or self._text(
            "gradient norm", norm, self._norms, result.grad_norm, LEAST_NORM
        )
        self._add(result.loss, result.grad_norm)
        return spike

    def _add(self, loss: float, norm: float) -> None:
        self._losses.append(loss)
        self._norms.append(_logarithm(norm))

    def _text(
        self, name: str, value: float, last: Sequence[float], shown: float, least: float
    ) -> str:
        if len(last) < LEAST:
            return ""
        middle = median(last)
        floor = least * abs(middle) if name == "loss" else least
        deviation = max(NORMAL * median(abs(each - middle) for each in last), floor)
        above = (value - middle) / deviation
        if not above > self._deviations:
            return ""
        usual = middle if name == "loss" else math.exp(middle)
        return (
            f"its {name} of {shown:.4g} is {above:.0f} deviations above the median of the last "
            f"{len(last)} steps, {usual:.4g}"
        )


def _logarithm(norm: float) -> float:
    return math.log(max(norm, 1e-300))
