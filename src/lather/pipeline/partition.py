"""Assigns layers to pipeline stages: consecutive layers in V order, where rank r holds stages r and
S - 1 - r of S.

`uniform` assigns as equal numbers of layers as possible. `smallest_peak` makes the peak memory of
the largest rank as small as possible, or nearly so. A rank has several *phases* (actions of its
schedule, steps of the optimizer), and in each its bytes are a sum over its layers,

    peak_r(A, B) = max over phases p of base_r(p) + sum over layers a in A of first_r(p, a) + sum
    over b in B of second_r(p, b)

for A in its first and B in its second stage. The ranks outside rank r take layers from both ends,
and rank r takes the next ones from both ends of the remaining layers [a, b). So this is a dynamic
program over [a, b):

    f_r(a, b) = min over a' < a, b' > b of max(f_{r-1}(a', b'), peak_r([a', a), [b, b')))

in O(n^4 P) steps for n layers on P ranks, vectorized over (a', b') and the phases. Only the largest
rank counts, so many partitions are equally good, and a much more even one often costs little more;
with uneven stages other ranks wait. So a second pass chooses, among all partitions within `SLACK`
of the minimum, the most even one: the one with the least sum of squares of the numbers of layers.

Blocks of multi-token prediction are always behind the last stage. They count as layers of that
stage; numbers of layers are without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from lather.errors import ConfigError

Array = npt.NDArray[np.float64]
SLACK = 0.01
"""Fraction by which the largest peak of a more even partition may exceed the minimum."""


@dataclass(frozen=True)
class RankPeaks:
    """Bytes of a pipeline rank in each phase, as sums over the layers of its two stages."""

    base: Array
    """(phases,): bytes that do not depend on the layers."""
    first: Array
    """(phases, layers of the model): bytes that each layer adds in the rank's first stage."""
    second: Array
    """(phases, layers of the model): bytes that each layer adds in the rank's second stage."""

    def peak(self, first: range, second: range) -> float:
        """Return the peak bytes with these layers in the two stages."""
        sums = (
            self.base
            + self.first[:, first.start : first.stop].sum(1)
            + self.second[:, second.start : second.stop].sum(1)
        )
        return float(sums.max())


@dataclass(frozen=True)
class Partition:
    """The number of layers of every stage, and the expected peaks."""

    layers: tuple[int, ...]
    """Number of layers of each stage."""
    largest: float
    """Peak of the largest pipeline rank, bytes."""
    uniform_largest: float
    """Peak of the largest rank under the uniform partition, bytes."""
    num_mtp: int = 0
    """Number of blocks of multi-token prediction."""

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of every stage."""
        return stages_of(self.layers)

    @property
    def uniform_layers(self) -> tuple[int, ...]:
        """Numbers of layers under the uniform partition."""
        return uniform(sum(self.layers), len(self.layers), self.num_mtp)


def stages_of(layers: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of every stage, from the numbers of layers."""
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(layers, initial=0)))


def uniform(num_layers: int, num_stages: int, num_mtp: int = 0) -> tuple[int, ...]:
    """Return equal numbers of layers for the stages, with `num_mtp` blocks of multi-token
    prediction in the last, which has at least one layer besides. Remaining layers go to inner
    stages first, since the outer ones also have the embedding, or the final norm and head. Raises
    ConfigError if there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers do not fill {num_stages} pipeline stages, two to a rank: lower "
            "parallel.pp"
        )
    last = max(1, (num_layers + num_mtp) // num_stages - num_mtp)
    others = num_stages - 1
    least, rest = divmod(num_layers - last, max(1, others))
    inner_first = [*range(1, others), 0]
    return (*(least + (stage in inner_first[:rest]) for stage in range(others)), last)


def smallest_peak(ranks: Sequence[RankPeaks], num_mtp: int = 0) -> Partition:
    """Return the most even partition whose largest peak is within `SLACK` of the minimum, for these
    pipeline ranks, whose bytes include `num_mtp` blocks of multi-token prediction; deterministic.

    Raises ConfigError if there are fewer layers than stages.
    """
    num_layers = ranks[0].first.shape[1]
    even = uniform(num_layers, 2 * len(ranks), num_mtp)
    least, _ = _search(ranks, num_mtp, lambda peaks, sizes: peaks, np.maximum)
    limit = least * (1 + SLACK)
    uniform_largest = largest_peak(ranks, even)
    if uniform_largest <= limit:
        return Partition(even, uniform_largest, uniform_largest, num_mtp)

    def squares(peaks: Array, sizes: Array) -> Array:
        return np.where(peaks <= limit, sizes, np.inf)

    _, layers = _search(ranks, num_mtp, squares, np.add)
    return Partition(layers, largest_peak(ranks, layers), uniform_largest, num_mtp)


def largest_peak(ranks: Sequence[RankPeaks], layers: Sequence[int]) -> float:
    """Return the peak of the largest rank with these numbers of layers."""
    stages = stages_of(layers)
    return max(peaks.peak(stages[rank], stages[-1 - rank]) for rank, peaks in enumerate(ranks))


def _search(
    ranks: Sequence[RankPeaks],
    num_mtp: int,
    charge: Callable[[Array, Array], Array],
    combine: Callable[[Array, Array], Array],
) -> tuple[float, tuple[int, ...]]:
    """Minimize the combined cost of all ranks; return the minimum and the numbers of layers that
    reach it. `charge` computes the cost of a rank from its peaks and from the sums of squares of
    its stages' sizes, both for all (a', b')."""
    n, num_ranks = ranks[0].first.shape[1], len(ranks)
    best = np.full((n + 1, n + 1), np.inf)
    best[0, n] = 0.0
    came_from = []
    for rank, peaks in enumerate(ranks):
        firsts, seconds = (
            np.concatenate((np.zeros((len(x), 1)), x.cumsum(1)), axis=1)
            for x in (peaks.first, peaks.second)
        )
        inside = num_ranks - 1 - rank  # each of these ranks needs a layer at both ends
        new, origin = np.full_like(best, np.inf), np.zeros((n + 1, n + 1), np.int64)
        ends = (
            [(a, a) for a in range(rank + 1, n - rank)]
            if not inside
            else _ends(n, rank + 1, inside)
        )
        for a, b in ends:  # [a, b) remains for the ranks inside this one
            first = firsts[:, a, None] - firsts[:, :a] + peaks.base[:, None]
            second = seconds[:, b + 1 :] - seconds[:, b, None]
            in_second = np.arange(1, n - b + 1) + (0 if rank else num_mtp)
            sizes = np.arange(a, 0, -1)[:, None] ** 2 + in_second[None, :] ** 2
            charged = charge(
                (first[:, :, None] + second[:, None, :]).max(0), sizes.astype(np.float64)
            )
            total = combine(best[:a, b + 1 :], charged)
            origin[a, b] = at = int(np.argmin(total))
            new[a, b] = total.flat[at]
        came_from.append(origin)
        best = new
    a = b = int(np.argmin(np.diagonal(best)))
    least = float(best[a, b])
    outer, inner = [], []
    for origin in reversed(came_from):
        row, column = divmod(int(origin[a, b]), n - b)
        outer.append(a - row)
        inner.append(column + 1)
        a, b = row, b + 1 + column
    return least, (*reversed(outer), *inner)


def _ends(n: int, outside: int, inside: int) -> list[tuple[int, int]]:
    """Return all [a, b) that leave at least `outside` layers on either side and contain at least 2
    * `inside` layers."""
    return [(a, b) for a in range(outside, n + 1) for b in range(a + 2 * inside, n - outside + 1)]
