"""A mixture gives every source its share at any moment, and knows how many samples each has given
without counting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lather.data.order import Mixture, floor_sum

WEIGHTS = [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [3, 1, 0, 2], [1e-3, 1.0], [1 / 3, 1 / 3, 1 / 3]]


@given(st.integers(0, 50), st.integers(1, 60), st.integers(0, 200), st.integers(-200, 200))
@settings(deadline=None)
def test_the_sum_of_floors(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", [0, 5, 2**63])
def test_counts_are_those_of_the_samples(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed)
    samples = mixture.samples(0, 1500)
    for stop in (0, 1, 2, 17, 1500):
        assert mixture.counts(stop) == [
            sum(source == number for source, _ in samples[:stop]) for number in range(len(weights))
        ]
    for number in range(len(weights)):
        assert [place for source, place in samples if source == number] == list(
            range(mixture.counts(1500)[number])
        )
    assert mixture.samples(700, 900) == samples[700:900]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", range(3))
def test_shares_are_right_to_a_thousandth_after_100_000_samples_and_to_a_few_samples_always(
    weights: list[float], seed: int
) -> None:
    mixture = Mixture(weights, seed)
    for stop in (100, 10_000, 100_000, 10**9):
        for count, weight in zip(mixture.counts(stop), weights, strict=True):
            expected = stop * weight / sum(weights)
            assert abs(count - expected) < 8
            assert stop < 100_000 or abs(count - expected) <= 1e-3 * max(expected, 1) + 1


def test_a_source_without_weight_is_never_read() -> None:
    assert Mixture([1, 0, 2], 0).counts(10**12)[1] == 0


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -0.5], [float("inf"), 1.0], [float("nan")]]
)
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(
        ValueError,
        match=r"weights = .* are not valid: they must be at least 0 and finite, and one above 0",
    ):
        Mixture(weights, 0)
