"""Layers to stages: known sizes, properties over all sizes, and `smallest_peak` against every
partition that exists."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from lather.errors import ConfigError
from lather.pipeline.partition import SLACK, RankPeaks, smallest_peak, stages_of, uniform


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
def test_uniform_on_known_sizes(num_layers: int, expected: tuple[int, ...]) -> None:
    assert uniform(num_layers, len(expected)) == expected


@pytest.mark.parametrize("num_stages", range(1, 17))
def test_uniform_spreads_all_layers_evenly(num_stages: int) -> None:
    for num_layers in range(num_stages, 65):
        layers = uniform(num_layers, num_stages)
        assert len(layers) == num_stages
        assert sum(layers) == num_layers
        assert (
            {num_layers // num_stages}
            <= set(layers)
            <= {num_layers // num_stages, num_layers // num_stages + 1}
        )
        assert all(abs(layer - layers[-1 - stage]) <= 1 for stage, layer in enumerate(layers))
        inner = layers[1:-1]
        # the first inner stages take what is left
        assert list(inner) == sorted(inner, reverse=True)
        assert (
            not inner
            or max(layers[0], layers[-1]) <= min(inner)
            or layers[0] == layers[-1] == num_layers // num_stages
        )
        assert [layer for stage in stages_of(layers) for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_layers", "num_mtp", "expected"),
    [
        (61, 1, (7, 8, 8, 8, 8, 8, 8, 6)),
        (60, 2, (7, 8, 8, 8, 8, 8, 8, 5)),
        (14, 1, (1, 2, 2, 2, 2, 2, 2, 1)),
        (5, 2, (1, 2, 1, 1)),
        (3, 2, (3,)),
    ],
)
def test_blocks_of_multi_token_prediction_count_in_the_last_stage(
    num_layers: int, num_mtp: int, expected: tuple[int, ...]
) -> None:
    assert uniform(num_layers, len(expected), num_mtp) == expected
    assert sum(expected) == num_layers


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers do not fill 4 pipeline stages"):
        uniform(3, 4)
    with pytest.raises(ConfigError, match="3 layers do not fill 4 pipeline stages"):
        smallest_peak([RankPeaks(np.ones(1), np.ones((1, 3)), np.ones((1, 3)))] * 2)


# --- by memory ------------------------------------------------------------------------------------


def random_ranks(generator: random.Random, num_ranks: int, num_layers: int) -> list[RankPeaks]:
    """Draw ranks with three phases, in whole numbers, so that sums are exact."""

    def some(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array(
            [generator.randint(0, 9) for _ in range(int(np.prod(shape)))], np.float64
        ).reshape(shape)

    return [
        RankPeaks(3 * some(3), some(3, num_layers), some(3, num_layers)) for _ in range(num_ranks)
    ]


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(right - left for left, right in pairwise((0, *cuts, num_layers)))


def largest(ranks: Sequence[RankPeaks], layers: Sequence[int]) -> float:
    """Compute the largest peak of any rank in any phase, adding layer by layer."""
    ends = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    stage_layers = [range(end - count, end) for end, count in zip(ends, layers, strict=True)]
    return max(
        float(peaks.base[phase])
        + sum(float(peaks.first[phase, layer]) for layer in stage_layers[rank])
        + sum(float(peaks.second[phase, layer]) for layer in stage_layers[-1 - rank])
        for rank, peaks in enumerate(ranks)
        for phase in range(len(peaks.base))
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_partition_is_the_most_even_of_those_that_are_nearly_the_smallest(seed: int) -> None:
    generator = random.Random(seed)
    num_ranks = generator.choice((1, 2, 3, 4))
    num_layers = generator.randint(2 * num_ranks, 11)
    ranks = random_ranks(generator, num_ranks, num_layers)
    num_mtp = seed % 3
    found = smallest_peak(ranks, num_mtp)
    every = {layers: largest(ranks, layers) for layers in all_partitions(num_layers, 2 * num_ranks)}
    near = [layers for layers, size in every.items() if size <= (1 + SLACK) * min(every.values())]
    assert found.layers in near

    def unevenness(layers: tuple[int, ...]) -> int:
        return sum(size**2 for size in (*layers[:-1], layers[-1] + num_mtp))

    assert unevenness(found.layers) == min(map(unevenness, near))
    assert found.largest == every[found.layers]
    assert found.uniform_layers == uniform(num_layers, 2 * num_ranks, num_mtp)
    assert found.uniform_largest == every[found.uniform_layers]
    assert found == smallest_peak(ranks, num_mtp)


def test_a_peak_is_the_largest_phase_and_no_sum_of_largest_parts() -> None:
    """The first stage counts in one phase, the second in another: 6 and 6 layers are as good as 12
    in either phase alone."""
    peaks = RankPeaks(
        np.zeros(2), np.array([[1.0] * 12, [0.0] * 12]), np.array([[0.0] * 12, [1.0] * 12])
    )
    found = smallest_peak([peaks])
    assert (found.layers, found.largest) == ((6, 6), 6.0)


def test_heavy_edges_get_fewer_layers() -> None:
    edge = RankPeaks(np.array([6.0]), np.ones((1, 12)), np.ones((1, 12)))
    inner = RankPeaks(np.array([0.0]), np.ones((1, 12)), np.ones((1, 12)))
    found = smallest_peak([edge, inner])
    assert found.largest == 9.0
    assert found.uniform_largest == 12.0
    assert sorted(found.layers[::3]) == [1, 2]


def test_layers_stay_even_where_memory_does_not_care() -> None:
    same = RankPeaks(np.array([100.0]), np.full((1, 27), 1e-3), np.full((1, 27), 1e-3))
    assert smallest_peak([same] * 4).layers == uniform(27, 8)
