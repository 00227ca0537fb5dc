"""Says, for the tests of every kernel, which implementations there are and when their results are
the expected ones."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

try:
    import triton
except ModuleNotFoundError:
    triton = None

INTERPRETER = pytest.mark.skipif(
    triton is None or torch.cuda.is_available(),
    reason="needs Triton's interpreter; tests/gpu has the devices",
)
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: 8e-3,
}  # the interpreter cuts bits off where bf16 should be rounded


def on_each(reference: ModuleType, kernels: ModuleType | None) -> pytest.MarkDecorator:
    """Run a test of `implementation` on the reference and on Triton's kernels, which are None
    without Triton."""
    params = [
        pytest.param(reference, id="reference"),
        pytest.param(kernels, id="triton", marks=INTERPRETER),
    ]
    return pytest.mark.parametrize("implementation", params)


def is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors differ, in norm, by no more than computing in `dtype` explains."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm()
    return bool(error <= TOLERANCE[dtype] * expected.double().norm())


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check that two tensors are close, and would not be if one were 1 % larger."""
    assert is_close(actual, expected, dtype)
    if expected.abs().sum() > 0:
        assert not is_close(1.01 * expected.double(), expected, dtype)
