"""Products of parameters of which the quick suite runs a part, and `make test-all` all: where the
values of one side hardly meet those of the other, a fault of either shows in any of its pairs."""

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(rows: Iterable[Any], columns: Iterable[Any], *, each: int = 1) -> list[Any]:
    """Pair every row, a value or a tuple of values, with every column. Each row has `each` pairs
    in the quick suite, which begin where those of the row before end, so that all columns have
    their turn; the other pairs are in the grid."""
    columns = list(columns)
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            column,
            marks=[pytest.mark.grid] * ((place - number * each) % len(columns) >= each),
        )
        for number, row in enumerate(rows)
        for place, column in enumerate(columns)
    ]
