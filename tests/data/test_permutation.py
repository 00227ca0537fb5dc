"""The shuffle without memory is a permutation, looks random, and does not depend on the order of
questions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lather.data.order import shuffled


@given(st.integers(1, 3000), st.lists(st.integers(0, 2**64 - 1), max_size=3))
@settings(deadline=None, max_examples=80)
def test_every_item_comes_once(n: int, key: list[int]) -> None:
    assert sorted(shuffled(np.arange(n), n, key).tolist()) == list(range(n))


def test_a_place_has_its_item_whatever_else_is_asked() -> None:
    whole = shuffled(np.arange(1000), 1000, (7,))
    assert [int(shuffled(place, 1000, (7,))) for place in (0, 3, 999)] == whole[
        [0, 3, 999]
    ].tolist()
    np.testing.assert_array_equal(shuffled([5, 5, 2], 1000, (7,)), whole[[5, 5, 2]])


def test_keys_and_sizes_give_unrelated_shuffles() -> None:
    n = 20_000
    some = [shuffled(np.arange(n), n, key) for key in ((0,), (1,), (0, 1), (0, 0, 1))]
    for index, one in enumerate(some):
        for other in (np.arange(n), *some[:index]):
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
            assert (one == other).sum() < 15  # one is expected


def test_neighbors_are_torn_apart() -> None:
    """2^16 items form 256 runs of 256 neighbors; each run hits each bin of places about once
    (chi-squared with 65,025 degrees)."""
    n = 2**16
    items = shuffled(np.arange(n), n, (3,))
    hits = np.bincount(np.arange(n) // 256 * 256 + items // 256, minlength=n)
    assert abs(((hits - 1.0) ** 2).sum() / n - 1) < 0.05


def test_numbers_beyond_32_bits() -> None:
    n = 10**15 + 7
    items = shuffled(np.arange(5000), n, (1,))
    assert len(set(items.tolist())) == 5000
    assert items.max() < n
    assert abs(items.mean() / n - 0.5) < 0.02


def test_a_place_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="place 10 is outside a shuffle of 10 items"):
        shuffled([0, 10], 10, (0,))
