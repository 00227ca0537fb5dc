"""Fills memory that nobody wrote to with NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill uninitialized memory with NaN (integer tensors with the largest integer)."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
