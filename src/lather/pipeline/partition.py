"""Layers -> pipeline stages: contiguous blocks in V order, rank r holding stages r and S - 1 - r of S.

Two rules. *uniform*: as many layers on every stage as go; what is left goes to inner stages first, as the edges also have the embedding
or the final norm and head. *memory*: given costs (bytes or seconds) per layer and of the two edges, the largest rank is made as small as
it can be. A rank's two stages are the ends of what the ranks outside it left, so this is a dynamic programme over what is left, [a, b):

    f_r(a, b) = min over a' < a, b' > b of max(f_{r-1}(a', b'), cost[a', a) + cost[b, b'))

It is exact, in O(n^4 P) time, vectorised over (a', b'): 0.3 s for 64 layers on 16 stages. A second pass of the same programme, over sums of
squares, takes the most even one of the optimal partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import Literal

import numpy as np
import numpy.typing as npt

from lather.errors import ConfigError, require

Array = npt.NDArray[np.float64]
Rule = Literal["uniform", "memory"]
RULES: tuple[Rule, ...] = ("uniform", "memory")


@dataclass(frozen=True)
class Partition:
    """How many layers every stage has, and what that costs."""

    layers: tuple[int, ...]
    """Number of layers by stage."""
    rank_costs: tuple[float, ...]
    """By pipeline rank, edges included, in the unit of the costs."""
    uniform_largest: float
    """The largest rank under the uniform rule."""

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of every stage."""
        ends = list(accumulate(self.layers))
        return tuple(range(end - count, end) for end, count in zip(ends, self.layers, strict=True))

    @property
    def largest(self) -> float:
        """The cost of the largest rank."""
        return max(self.rank_costs)

    @property
    def gain(self) -> float:
        """The part of the uniform rule's largest rank that this partition saves: 0 for the uniform rule itself."""
        return 1 - self.largest / self.uniform_largest if self.uniform_largest else 0.0

    def describe(self, unit: str = "") -> str:
        """One line: layers by stage, largest rank and what was gained. `unit` is that of the costs."""
        saved = f", {self.gain:.1%} less than the uniform rule's" if self.gain > 0 else ""
        return f"layers by stage: {' '.join(map(str, self.layers))}; largest rank {self.largest:.4g}{unit and f' {unit}'}{saved}"


def partition(
    costs: Sequence[float], num_stages: int, *, rule: Rule = "uniform", edge_costs: tuple[float, float] = (0.0, 0.0)
) -> Partition:
    """Layers with `costs`, in order, on `num_stages` stages; `edge_costs` come on top of the first and the last stage.

    Deterministic. Among partitions with the same largest rank, the memory rule takes one with the least sum of squares over the
    stages, the uniform rule's if that is one. Raises ConfigError for fewer layers than stages, for costs that are negative or not
    finite, and, under the memory rule, for an odd number of stages above 1 (there is no V).
    """
    require(rule in RULES, "parallel.partition", rule, f"one of {RULES}")
    require(num_stages >= 1, "number of stages", num_stages, "at least 1")
    if len(costs) < num_stages:
        raise ConfigError(f"{len(costs)} layers do not fill {num_stages} pipeline stages, two to a rank: lower parallel.pp")
    for name, values in (("layer costs", costs), ("edge_costs", edge_costs)):
        require(all(isfinite(cost) and cost >= 0 for cost in values), name, tuple(values), "finite and not negative")
    uniform = _uniform(len(costs), num_stages)
    of_uniform = _stage_costs(uniform, costs, edge_costs)
    layers = uniform
    if rule == "memory" and num_stages > 1:
        require(num_stages % 2 == 0, "number of stages", num_stages, "even: two to a rank")
        layers = _most_even_of_the_best(costs, edge_costs, uniform)
    ranks = _rank_costs(_stage_costs(layers, costs, edge_costs))
    return Partition(layers, ranks, max(_rank_costs(of_uniform)))


def _uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    layers = [num_layers // num_stages] * num_stages
    for _ in range(num_layers % num_stages):
        least = min(layers)
        inner = (stage for stage in range(1, num_stages - 1) if layers[stage] == least)
        edges = (stage for stage in (0, num_stages - 1) if layers[stage] == least)
        layers[next(inner, next(edges, 0))] += 1
    return tuple(layers)


def _stage_costs(layers: Sequence[int], costs: Sequence[float], edge_costs: tuple[float, float]) -> list[float]:
    ends = list(accumulate(layers))
    stages = [float(sum(costs[end - count : end])) for end, count in zip(ends, layers, strict=True)]
    stages[0] += edge_costs[0]
    stages[-1] += edge_costs[1]
    return stages


def _rank_costs(stages: Sequence[float]) -> tuple[float, ...]:
    last = len(stages) - 1
    return tuple(sum(stages[stage] for stage in {rank, last - rank}) for rank in range((last + 2) // 2))


def _most_even_of_the_best(costs: Sequence[float], edge_costs: tuple[float, float], uniform: tuple[int, ...]) -> tuple[int, ...]:
    """Two passes of `_search`: the least largest rank, then the least sum of squares over the stages among those that reach it."""
    sums = np.concatenate(([0.0], np.cumsum(costs, dtype=np.float64)))
    least, layers = _search(sums, edge_costs, len(uniform), lambda first, second: first + second, np.maximum)
    limit = least * (1 + 1e-12)  # sums in another order must not shut out an equal partition

    def squares(first: Array, second: Array) -> Array:
        return np.where(first + second <= limit, first**2 + second**2, np.inf)

    evenness, layers = _search(sums, edge_costs, len(uniform), squares, np.add)
    stages = _stage_costs(uniform, costs, edge_costs)
    uniform_is_best = max(_rank_costs(stages)) <= limit and sum(cost**2 for cost in stages) <= evenness * (1 + 1e-12)
    return uniform if uniform_is_best else layers


def _search(
    sums: Array,
    edge_costs: tuple[float, float],
    num_stages: int,
    charge: Callable[[Array, Array], Array],
    combine: Callable[[Array, Array], Array],
) -> tuple[float, tuple[int, ...]]:
    """The least of all ranks' charges, combined, and the layers by stage that reach it. `sums[i]` is the cost of the first i layers."""
    n, num_ranks = len(sums) - 1, num_stages // 2
    best = np.full((n + 1, n + 1), np.inf)
    best[0, n] = 0.0
    came_from = []
    for rank in range(num_ranks):
        first_edge, last_edge = edge_costs if rank == 0 else (0.0, 0.0)
        inside = num_ranks - 1 - rank  # each rank inside needs a layer at both ends
        new, origin = np.full_like(best, np.inf), np.zeros((n + 1, n + 1), np.int64)
        ends = [(a, a) for a in range(rank + 1, n - rank)] if not inside else _ends(n, rank + 1, inside)
        for a, b in ends:  # [a, b) is left for the ranks inside this one
            first = sums[a] - sums[:a, None] + first_edge
            second = sums[b + 1 :] - sums[b] + last_edge
            total = combine(best[:a, b + 1 :], charge(first, second))
            origin[a, b] = at = int(np.argmin(total))
            new[a, b] = total.flat[at]
        came_from.append(origin)
        best = new
    a = b = int(np.argmin(np.diagonal(best)))
    least = float(best[a, b])
    firsts, seconds = [], []
    for origin in reversed(came_from):
        row, column = divmod(int(origin[a, b]), n - b)
        firsts.append(a - row)
        seconds.append(column + 1)
        a, b = row, b + 1 + column
    return least, (*reversed(firsts), *seconds)


def _ends(n: int, outside: int, inside: int) -> list[tuple[int, int]]:
    """[a, b) with at least `outside` layers on either side of it and 2 * `inside` in it."""
    return [(a, b) for a in range(outside, n + 1) for b in range(a + 2 * inside, n - outside + 1)]
