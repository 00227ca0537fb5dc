"""With `train.fp8` rows travel to their experts in FP8: the same bits as if they were rounded where
they arrive, in half of the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from fp8_dispatch_runs import ENGINES, EXCHANGES, engines, exchanges
from ranks import run_ranks

RANKS = [2, pytest.param(4, marks=pytest.mark.grid)]


@pytest.fixture(scope="module", params=RANKS)
def exchanged(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, dict[str, bool]]]]:
    return request.param, run_ranks(exchanges, request.param)


def test_what_arrives_are_the_bits_that_the_receiver_would_make(
    exchanged: tuple[int, list[dict[str, dict[str, bool]]]],
) -> None:
    """For each element a byte, and 4 for each 128 of them, in as many messages as in bf16; widths
    that no block, word or pair of bytes divides; ranks that send or receive nothing; padding."""
    world_size, ranks = exchanged
    for found in ranks:
        assert found.keys() == EXCHANGES[world_size].keys()
        assert {
            (name, what)
            for name, checks in found.items()
            for what, holds in checks.items()
            if not holds
        } == set()


@pytest.mark.parametrize("world_size", RANKS)
def test_a_step_has_the_bits_of_rows_that_travel_in_bf16(world_size: int) -> None:
    ranks: list[list[dict[str, Any]]] = run_ranks(engines, world_size, timeout=200)
    for found in ranks:
        for case, result in zip(ENGINES[world_size], found, strict=True):
            rows = result.pop("rows")
            assert all(result.values()), (case.name(), result)
            assert rows > 0
