"""Fills memory that nobody wrote to with NaN, and lets Triton's interpreter multiply bf16."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill uninitialized memory with NaN (integer tensors with the largest integer)."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen bf16 operands of products in the interpreter, which would multiply their bits as
    integers."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype("uint32") << 16
        return TensorHandle(bits.view("float32"), tl.float32)

    def create_wide_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_wide_dot)
