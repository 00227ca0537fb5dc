"""Fills memory that nobody wrote to with NaN, and lets Triton's interpreter multiply bf16, and
convert e4m3."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lather.kernels.backend import HAS_TRITON
from lather.kernels.block_scaled import DTYPE


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


@pytest.fixture
def _exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert e4m3 in the interpreter as GPUs and torch do: its own conversion loses carries and
    NaN."""
    if not HAS_TRITON:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert, multiply = InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_dot

    def exact(self: Any, x: Any, dtype: Any, rounding: Any) -> Any:
        data = torch.from_numpy(np.ascontiguousarray(x.data))
        if dtype.scalar == tl.float8e4nv and x.dtype.scalar == tl.float32:
            codes = data.to(DTYPE).view(torch.uint8)
            return TensorHandle(codes.numpy(), tl.float8e4nv)
        if x.dtype.scalar == tl.float8e4nv:
            assert dtype.scalar == tl.float32
            return TensorHandle(data.view(DTYPE).float().numpy(), tl.float32)
        return convert(self, x, dtype, rounding)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = (
            exact(self, x, tl.float32, None) if x.dtype.scalar == tl.float8e4nv else x
            for x in (a, b)
        )
        return multiply(self, *wide, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", exact)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
