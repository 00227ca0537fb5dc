"""The order of a run's samples: every sequence once in an epoch, shares by weight, and nothing to
remember."""

from collections import Counter
from itertools import pairwise

import pytest

from lather.data.order import MixturePhase, Order


def chunked(order: Order, stop: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the samples below `stop`, asked for in pieces of these sizes, over and over."""
    found: list[tuple[int, int]] = []
    while len(found) < stop:
        found += order.samples(len(found), min(stop, len(found) + sizes[len(found) % len(sizes)]))
    return found


@pytest.mark.parametrize("sizes", [[7], [5, 11, 3]])
def test_without_weights_every_sequence_comes_once_in_an_epoch_each_time_in_another_order(
    sizes: list[int],
) -> None:
    order, n = Order(sizes, 3), sum(sizes)
    everything = {(source, index) for source, size in enumerate(sizes) for index in range(size)}
    epochs = [order.samples(epoch * n, (epoch + 1) * n) for epoch in range(4)]
    assert all(set(epoch) == everything for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))


@pytest.mark.parametrize(
    "phases",
    [
        [MixturePhase(0)],
        [MixturePhase(0, (1, 2, 0.5))],
        [
            MixturePhase(0),
            MixturePhase(13, (1, 1, 1)),
            MixturePhase(40, (5, 1, 1)),
            MixturePhase(90),
        ],
    ],
)
def test_samples_do_not_depend_on_how_they_are_asked_for(phases: list[MixturePhase]) -> None:
    order = Order([7, 20, 4], 1, phases)
    whole = order.samples(0, 150)
    for sizes in ((1,), (4, 7), (64,)):
        assert chunked(Order([7, 20, 4], 1, phases), 150, sizes) == whole


def test_with_weights_each_source_goes_through_epochs_of_its_own() -> None:
    order = Order([10, 30], 0, [MixturePhase(0, (0.5, 0.5))])
    samples = order.samples(0, 120)
    of_first = [index for source, index in samples if source == 0]
    of_second = [index for source, index in samples if source == 1]
    assert abs(len(of_first) - 60) <= 3
    for start in range(0, len(of_first) - 10, 10):
        assert sorted(of_first[start : start + 10]) == list(range(10))
    assert sorted(of_second[:30]) == list(range(30))
    assert [len(of_first) / 10, len(of_second) / 30] == pytest.approx([6, 2], abs=0.3)


def test_weights_that_change_go_on_where_each_source_was() -> None:
    order = Order([40, 40], 0, [MixturePhase(0, (1, 3)), MixturePhase(50, (3, 1))])
    samples = order.samples(0, 100)
    counts = [Counter(source for source, _ in part) for part in (samples[:50], samples[50:])]
    assert counts[0][1] > 2 * counts[0][0]
    assert counts[1][0] > 2 * counts[1][1]
    for source in (0, 1):
        first_epoch = [index for which, index in samples if which == source][:40]
        assert sorted(first_epoch) == list(range(40))


def test_another_seed_is_another_order() -> None:
    assert (
        Order([50], 0).samples(0, 50)
        == Order([50], 0).samples(0, 50)
        != Order([50], 1).samples(0, 50)
    )
