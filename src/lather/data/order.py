"""The order in which a run reads sequences: a function of the seed and the sample's number, so that it has no state to save.

Without weights the sequences of all sources are shuffled together, differently in every epoch, and an epoch reads each once. With weights
every source has its share of the samples, and is shuffled in epochs of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lather.data.mixture import Mixture
from lather.data.permutation import shuffled


class Samples(Protocol):
    """The samples of a run."""

    sizes: list[int]
    """Number of sequences of each source."""

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the source and the sequence of each sample from `start` until `stop`."""


@dataclass(frozen=True)
class MixturePhase:
    """The weights of the sources from sample `start` on. Empty: in the first phase an epoch has every sequence once; in later phases
    the weights are the sources' sizes."""

    start: int
    weights: tuple[float, ...] = ()
    num_sources: int | None = None
    """Only this number of sources, the first ones, take part in the phase; None: all."""


class Order:
    """The samples of a run, computed from the seed and the samples' numbers."""

    def __init__(self, sizes: Sequence[int], seed: int, phases: Sequence[MixturePhase] = (MixturePhase(0),)) -> None:
        """`sizes`: number of sequences of each source; `phases`: in order, the first of them from sample 0 on."""
        self.sizes, self.seed = list(sizes), seed
        self.phases = [phases[0], *(self._weighted(phase) for phase in phases[1:])]
        self._firsts = list(accumulate(sizes, initial=0))
        self._used = [[0] * len(sizes)]  # samples of each source before each phase
        for phase, following in zip(self.phases, self.phases[1:], strict=False):
            counts = self._counts(phase, following.start - phase.start)
            self._used.append([before + count for before, count in zip(self._used[-1], counts, strict=True)])

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the source and the sequence of each sample from `start` until `stop`."""
        found: list[tuple[int, int]] = []
        while start < stop:
            number = bisect_right(self.phases, start, key=lambda phase: phase.start) - 1
            phase_stop = min(stop, self.phases[number + 1].start) if number + 1 < len(self.phases) else stop
            found += self._of_phase(number, start, phase_stop)
            start = phase_stop
        return found

    def epochs(self, samples: int) -> list[float]:
        """Return the number of epochs of each source in the first `samples` samples."""
        number = bisect_right(self.phases, samples, key=lambda phase: phase.start) - 1
        counts = self._counts(self.phases[number], samples - self.phases[number].start)
        return [(before + count) / size for before, count, size in zip(self._used[number], counts, self.sizes, strict=True)]

    def _of_phase(self, number: int, start: int, stop: int) -> list[tuple[int, int]]:
        phase = self.phases[number]
        if not phase.weights:
            items = _epochs(range(start, stop), self._firsts[self._num_sources(phase)], (self.seed,))
            sources = np.searchsorted(self._firsts, items, side="right") - 1
            return [(int(source), int(item) - self._firsts[source]) for source, item in zip(sources, items, strict=True)]
        samples = Mixture(phase.weights, self.seed).samples(start - phase.start, stop - phase.start)
        found: list[tuple[int, int]] = [(0, 0)] * len(samples)
        for source in {source for source, _ in samples}:
            rows = [row for row, sample in enumerate(samples) if sample[0] == source]
            places = [self._used[number][source] + samples[row][1] for row in rows]
            for row, item in zip(rows, _epochs(places, self.sizes[source], (self.seed, 1 + source)), strict=True):
                found[row] = (source, int(item))
        return found

    def _counts(self, phase: MixturePhase, samples: int) -> list[int]:
        """Return the number of samples of each source among the first ones of a phase; without weights it is an estimate."""
        present = self._num_sources(phase)
        if phase.weights:
            counts = Mixture(phase.weights, self.seed).counts(samples)
        else:
            counts = [round(samples * size / self._firsts[present]) for size in self.sizes[:present]]
        return counts + [0] * (len(self.sizes) - present)

    def _weighted(self, phase: MixturePhase) -> MixturePhase:
        """Give a later phase without weights the sizes as weights, so that each source continues where it was."""
        return replace(phase, weights=phase.weights or tuple(self.sizes[: self._num_sources(phase)]))

    def _num_sources(self, phase: MixturePhase) -> int:
        return len(self.sizes) if phase.num_sources is None else phase.num_sources


def _epochs(samples: Sequence[int], size: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the items at `samples` in a sequence of shuffles of `size` items, one per epoch."""
    epochs, places = np.divmod(np.asarray(samples, dtype=np.int64), size)
    items = np.empty_like(places)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        items[of_epoch] = shuffled(places[of_epoch], size, (*key, int(epoch)))
    return items
