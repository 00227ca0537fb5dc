"""The bytes that each family keeps from the forward to the backward pass: the ledger of a dry run
says those of real tensors."""

from __future__ import annotations

from typing import Any

import pytest
from kept_bytes import KeptCase, counted, planned

from lather.memory.workers import worker_processes
from models.tiny import FAMILY_TABLES, KINDS

ALL = ("attention", "experts", "shared_experts")


def test_kept_bytes_are_those_of_the_ledger() -> None:
    compare([KeptCase(family) for family in KINDS])


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "how", [{}, {"memory": "recompute"}, {"memory": "reference"}, {"recompute": ALL}], ids=str
)
def test_kept_bytes_of_every_family_are_those_of_the_ledger(how: dict[str, Any]) -> None:
    compare([KeptCase(family, **how) for family in FAMILY_TABLES])


def compare(cases: list[KeptCase]) -> None:
    with worker_processes() as pool:
        expected = pool.submit(planned, cases)
        found = [counted(case) for case in cases]
        bytes_of = dict(zip(cases, expected.result(timeout=800), strict=True))
    assert dict(zip(cases, found, strict=True)) == bytes_of
