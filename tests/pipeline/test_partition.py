"""Layers to stages: the specified cases, properties over all sizes, and the memory rule against every partition there is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from lather.errors import ConfigError
from lather.pipeline.partition import partition

EVEN = range(2, 17, 2)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (27, (3, 4, 4, 4, 3, 3, 3, 3)),
        (48, (6,) * 8),
        (3, (2, 1)),
        (5, (2, 2, 1)),
        (15, (2, 2, 2, 2, 2, 2, 2, 1)),
        (14, (1, 2, 2, 2, 2, 2, 2, 1)),
        (7, (7,)),
    ],
)
def test_the_uniform_rule_on_known_sizes(num_layers: int, expected: tuple[int, ...]) -> None:
    assert partition([1.0] * num_layers, len(expected)).layers == expected


@pytest.mark.parametrize("num_stages", range(1, 17))
def test_the_uniform_rule_spreads_all_layers_evenly(num_stages: int) -> None:
    for num_layers in range(num_stages, 65):
        result = partition([1.0] * num_layers, num_stages)
        layers = result.layers
        assert len(layers) == num_stages
        assert sum(layers) == num_layers
        assert {num_layers // num_stages} <= set(layers) <= {num_layers // num_stages, num_layers // num_stages + 1}
        assert all(abs(layer - layers[-1 - stage]) <= 1 for stage, layer in enumerate(layers))
        inner = layers[1:-1]
        assert list(inner) == sorted(inner, reverse=True)  # the first inner stages take what is left
        assert not inner or max(layers[0], layers[-1]) <= min(inner) or layers[0] == layers[-1] == num_layers // num_stages
        assert [layer for stage in result.stages for layer in stage] == list(range(num_layers))
        assert result.gain == 0


@pytest.mark.parametrize("num_stages", EVEN)
def test_the_memory_rule_on_equal_layers_is_the_uniform_rule(num_stages: int) -> None:
    for num_layers in (num_stages, num_stages + 1, 27):
        if num_layers >= num_stages:
            result = partition([1.0] * num_layers, num_stages, rule="memory")
            assert result.largest <= partition([1.0] * num_layers, num_stages).largest
            assert result.largest >= num_layers / (num_stages // 2)
            if result.gain == 0:
                assert result.layers == partition([1.0] * num_layers, num_stages).layers


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(right - left for left, right in pairwise(ends))


def stage_costs(layers: Sequence[int], costs: Sequence[int], edges: tuple[int, int]) -> list[int]:
    queue = list(costs)
    stages = [sum(queue.pop(0) for _ in range(count)) for count in layers]
    stages[0] += edges[0]
    stages[-1] += edges[1]
    return stages


def largest(stages: Sequence[int]) -> int:
    return max(stages[rank] + stages[len(stages) - 1 - rank] for rank in range(len(stages) // 2))


@pytest.mark.parametrize("seed", range(40))
def test_the_memory_rule_is_the_best_and_most_even_of_all_partitions(seed: int) -> None:
    generator = random.Random(seed)
    num_stages = generator.choice((2, 4, 6, 8))
    costs = [generator.randint(0, 9) for _ in range(generator.randint(num_stages, 11))]
    edges = (generator.randint(0, 20), generator.randint(0, 20))
    result = partition([float(cost) for cost in costs], num_stages, rule="memory", edge_costs=edges)
    every = [stage_costs(layers, costs, edges) for layers in all_partitions(len(costs), num_stages)]
    least = min(map(largest, every))
    found = stage_costs(result.layers, costs, edges)
    assert (largest(found), result.largest) == (least, least)
    assert sum(cost**2 for cost in found) == min(sum(cost**2 for cost in stages) for stages in every if largest(stages) == least)
    uniform = stage_costs(partition([1.0] * len(costs), num_stages).layers, costs, edges)
    assert result.gain == pytest.approx(1 - least / largest(uniform) if largest(uniform) else 0)


@pytest.mark.parametrize("num_stages", EVEN)
def test_the_memory_rule_fills_every_stage_and_never_loses(num_stages: int) -> None:
    generator = random.Random(num_stages)
    for num_layers in (num_stages, num_stages + 3, 64 if num_stages == 16 else 19):
        costs = [generator.uniform(1, 3) for _ in range(num_layers)]
        result = partition(costs, num_stages, rule="memory", edge_costs=(4.0, 7.0))
        assert min(result.layers) >= 1
        assert sum(result.layers) == num_layers
        assert 0 <= result.gain < 1
        assert result == partition(costs, num_stages, rule="memory", edge_costs=(4.0, 7.0))
        assert sum(result.rank_costs) == pytest.approx(sum(costs) + 11)


def test_what_was_gained_is_said() -> None:
    heavy_edges = partition([1.0] * 12, 4, rule="memory", edge_costs=(3.0, 3.0))
    assert heavy_edges.rank_costs == (9.0, 9.0)
    assert heavy_edges.gain == pytest.approx(1 - 9 / 12)
    assert "25.0% less" in heavy_edges.describe()
    assert "less" not in partition([1.0] * 12, 4).describe()
    assert partition([0.0] * 4, 4, rule="memory").gain == 0


@pytest.mark.parametrize(
    ("costs", "num_stages", "options", "message"),
    [
        ([1.0] * 3, 4, {}, "3 layers do not fill 4 pipeline stages"),
        ([1.0] * 3, 0, {}, "number of stages = 0"),
        ([1.0, -1.0], 2, {}, "layer costs"),
        ([1.0, float("nan")], 2, {}, "layer costs"),
        ([1.0] * 2, 2, {"edge_costs": (0.0, float("inf"))}, "edge_costs"),
        ([1.0] * 5, 3, {"rule": "memory"}, "even"),
    ],
    ids=["too few layers", "no stage", "negative", "nan", "infinite edge", "odd stages"],
)
def test_what_cannot_be_partitioned_is_refused(costs: list[float], num_stages: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(costs, num_stages, **options)  # type: ignore[arg-type]
