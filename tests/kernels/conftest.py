"""Memory that nobody wrote to holds NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN (the largest integer, in integer tensors)."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
