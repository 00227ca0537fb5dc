"""Assigns each sample of a run to a source, as a function of the sample's number, so that every source has its share at any moment.

The unit interval is divided among the sources in proportion to their weights, and sample k goes to the source that contains the point
frac(k * phi + offset). Multiples of the golden ratio phi spread over the interval as evenly as a sequence can: after k samples every source
has its share of them up to a few samples. The number of samples before k that went to a source is a sum of floor((a i + b) / m) over i,
which Euclid's algorithm computes in O(log k) steps; so a resumed run needs only the number of its next sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

MODULUS = 1 << 62
STEP = 2850178704830799621
"""The golden ratio's fractional part times `MODULUS`, rounded to an odd number, so that no point occurs twice."""


class Mixture:
    """Divides the samples 0, 1, ... among sources."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """`weights`: at least 0, not all 0; a source's share is its weight divided by their sum."""
        total = math.fsum(weights)
        if not weights or not 0 < total < math.inf or min(weights) < 0:
            raise ValueError(f"weights = {list(weights)} are not valid: they must be at least 0 and finite, and one above 0")
        edges = [round(math.fsum(weights[:number]) / total * MODULUS) for number in range(len(weights) + 1)]
        self._edges = [*edges[:-1], MODULUS]
        self._offset = (seed * 0x9E3779B97F4A7C15) % MODULUS

    def counts(self, stop: int) -> list[int]:
        """Return how many of the samples below `stop` each source has."""
        below = [self._count_below(edge, stop) for edge in self._edges]
        return [after - before for before, after in pairwise(below)]

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return, for each sample from `start` until `stop`, its source, and its number among that source's samples, from 0."""
        used, found = self.counts(start), []
        for sample in range(start, stop):
            point = (STEP * sample + self._offset) % MODULUS
            source = next(number for number, edge in enumerate(self._edges[1:]) if point < edge)
            found.append((source, used[source]))
            used[source] += 1
        return found

    def _count_below(self, edge: int, stop: int) -> int:
        """Count the samples below `stop` whose point is below `edge`: x mod m < e exactly if floor(x / m) - floor((x - e) / m) is 1."""
        return floor_sum(stop, MODULUS, STEP, self._offset) - floor_sum(stop, MODULUS, STEP, self._offset - edge)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum over i in `range(n)` of floor((a i + b) / m), for m > 0, in O(log m) steps."""
    total = 0
    while n > 0:
        total += (a // m) * (n * (n - 1) // 2) + (b // m) * n
        a, b = a % m, b % m
        highest = a * n + b
        n, b = divmod(highest, m)  # continue with the same sum, its axes exchanged
        m, a = a, m
    return total
