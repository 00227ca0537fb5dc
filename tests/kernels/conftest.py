"""Without a CUDA device the Triton kernels run in Triton's interpreter, on CPU tensors; and memory that nobody wrote to holds NaN."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before lather.kernels.*.triton is imported


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN (the largest integer, in integer tensors)."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
