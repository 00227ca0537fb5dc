"""The order in which a run reads sequences: a function of the seed and the sample's number, so that
it has no state to save.

Without weights the sequences of all sources are shuffled together, differently in every epoch, and
an epoch reads each once. With weights every source has its share of the samples, and is shuffled in
epochs of its own.

Shares: the unit interval is divided among the sources in proportion to their weights, and sample k
goes to the source that contains the point frac(k * phi + offset). Multiples of the golden ratio phi
spread over the interval as evenly as a sequence can: after k samples every source has its share of
them up to a few samples. The number of samples before k that went to a source is a sum of floor((a
i + b) / m) over i, which Euclid's algorithm computes in O(log k) steps; so a resumed run needs only
the number of its next sample.

Shuffles need no memory: the item at a place is computed from the place and a key. A Feistel network
is a permutation of the numbers below 4^k for any round functions (Luby and Rackoff, 1988). Applied
repeatedly until the result is below n ("cycle walking", Black and Rogaway, 2002), it is a
permutation of the numbers below n. As 4^k is less than 4 n, fewer than four applications are needed
on average."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

MODULUS = 1 << 62
STEP = 2850178704830799621
"""The golden ratio's fractional part times `MODULUS`, rounded to an odd number, so that no point
occurs twice."""
ROUNDS = 8
"""Rounds of the Feistel network."""


@dataclass(frozen=True)
class MixturePhase:
    """The weights of the sources from sample `start` on. Empty: in the first phase an epoch has
    every sequence once; in later phases the weights are the sources' sizes."""

    start: int
    weights: tuple[float, ...] = ()
    num_sources: int | None = None
    """Only this number of sources, the first ones, take part in the phase; None: all."""


class Order:
    """The samples of a run, computed from the seed and the samples' numbers."""

    def __init__(
        self, sizes: Sequence[int], seed: int, phases: Sequence[MixturePhase] = (MixturePhase(0),)
    ) -> None:
        """`sizes`: number of sequences of each source; `phases`: in order, the first of them from
        sample 0 on."""
        self.sizes, self.seed = list(sizes), seed
        self._firsts = list(accumulate(sizes, initial=0))
        self._starts = [phase.start for phase in phases]
        self._shares = [self._shares_of(phase) for phase in phases]
        # a later phase without weights is a mixture, too, so that each source continues where it
        # was
        self._mixtures = [
            Mixture(self._shares[number], seed) if number or phase.weights else None
            for number, phase in enumerate(phases)
        ]
        self._used = [[0] * len(sizes)]  # samples of each source before each phase
        for number, (start, stop) in enumerate(pairwise(self._starts)):
            self._used.append(
                [
                    before + count
                    for before, count in zip(
                        self._used[-1], self._counts(number, stop - start), strict=True
                    )
                ]
            )

    @property
    def epoch_size(self) -> int:
        """Number of sequences of the sources that take part in the last phase."""
        shares = zip(self.sizes, self._shares[-1], strict=True)
        return sum(size for size, share in shares if share)

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the source and the sequence of each sample from `start` until `stop`."""
        samples: list[tuple[int, int]] = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            phase_stop = min([stop, *self._starts[number + 1 : number + 2]])
            samples += self._of_phase(number, start, phase_stop)
            start = phase_stop
        return samples

    def passes(self, stop: int) -> list[float]:
        """Return how often each source has been read before sample `stop`; sources that are
        shuffled together have been read equally often."""
        number = bisect_right(self._starts, stop) - 1
        if self._mixtures[number] is None:
            shares = self._shares[number]
            return [stop / sum(shares) if share else 0.0 for share in shares]
        counts = self._counts(number, stop - self._starts[number])
        return [
            (before + count) / size
            for before, count, size in zip(self._used[number], counts, self.sizes, strict=True)
        ]

    def _of_phase(self, number: int, start: int, stop: int) -> list[tuple[int, int]]:
        mixture = self._mixtures[number]
        if mixture is None:
            items = _epochs(range(start, stop), int(sum(self._shares[number])), (self.seed,))
            sources = np.searchsorted(self._firsts, items, side="right") - 1
            return [
                (int(source), int(item) - self._firsts[source])
                for source, item in zip(sources, items, strict=True)
            ]
        samples = mixture.samples(start - self._starts[number], stop - self._starts[number])
        for source, (size, used) in enumerate(zip(self.sizes, self._used[number], strict=True)):
            rows = [row for row, sample in enumerate(samples) if sample[0] == source]
            items = _epochs([used + samples[row][1] for row in rows], size, (self.seed, 1 + source))
            for row, item in zip(rows, items, strict=True):
                samples[row] = (source, int(item))
        return samples

    def _counts(self, number: int, samples: int) -> list[int]:
        """Return the number of samples of each source among the first ones of a phase; without
        weights it is an estimate."""
        mixture, shares = self._mixtures[number], self._shares[number]
        return (
            mixture.counts(samples)
            if mixture
            else [round(samples * size / sum(shares)) for size in shares]
        )

    def _shares_of(self, phase: MixturePhase) -> list[float]:
        """Return the weight of each source, or else its size; 0 for sources that do not take
        part."""
        shares = [*(phase.weights or self.sizes[: phase.num_sources])]
        return shares + [0] * (len(self.sizes) - len(shares))


def _epochs(samples: Sequence[int], size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the items at `samples` in a sequence of shuffles of `size` items, one per epoch."""
    epochs, places = np.divmod(np.asarray(samples, dtype=np.int64), size)
    items = np.empty_like(places)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        items[of_epoch] = shuffled(places[of_epoch], size, (*key, int(epoch)))
    return items


# --- shares ---------------------------------------------------------------------------------------


class Mixture:
    """Divides the samples 0, 1, ... among sources."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """`weights`: at least 0, not all 0; a source's share is its weight divided by their sum."""
        total = math.fsum(weights)
        if not weights or not 0 < total < math.inf or min(weights) < 0:
            raise ValueError(
                f"weights = {list(weights)} are not valid: they must be at least 0 and finite, and "
                "one above 0"
            )
        edges = [
            round(math.fsum(weights[:number]) / total * MODULUS)
            for number in range(len(weights) + 1)
        ]
        self._edges = [*edges[:-1], MODULUS]
        self._offset = (seed * 0x9E3779B97F4A7C15) % MODULUS

    def counts(self, stop: int) -> list[int]:
        """Return how many of the samples below `stop` each source has."""
        below = [self._count_below(edge, stop) for edge in self._edges]
        return [after - before for before, after in pairwise(below)]

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return, for each sample from `start` until `stop`, its source, and its number among that
        source's samples, from 0."""
        used, samples = self.counts(start), []
        for sample in range(start, stop):
            point = (STEP * sample + self._offset) % MODULUS
            source = bisect_right(self._edges, point) - 1
            samples.append((source, used[source]))
            used[source] += 1
        return samples

    def _count_below(self, edge: int, stop: int) -> int:
        """Count the samples below `stop` whose point is below `edge`: x mod m < e exactly if
        floor(x / m) - floor((x - e) / m) is 1."""
        return floor_sum(stop, MODULUS, STEP, self._offset) - floor_sum(
            stop, MODULUS, STEP, self._offset - edge
        )


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


# --- shuffles -------------------------------------------------------------------------------------


def shuffled(places: npt.ArrayLike, n: int, key: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the items at these places of a shuffle of `range(n)`. Each `key` (integers of at least
    0) gives another shuffle.

    Raises ValueError for a place outside `range(n)`.
    """
    items = np.array(places, dtype=np.uint64)
    if items.size and int(items.max()) >= n:
        raise ValueError(f"place {items.max()} is outside a shuffle of {n} items")
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    round_keys = (
        np.random.SeedSequence([n, *key]).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    )
    outside = np.ones(items.shape, dtype=bool)
    while outside.any():
        items[outside] = _feistel(items[outside], half, round_keys)
        outside = items >= n
    return items.astype(np.int64)


def _feistel(
    x: npt.NDArray[np.uint64], half: np.uint64, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Permute the numbers of 2 * `half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for round_key in round_keys:
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return (left << half) | right


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every
    input bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
