"""Says, for the tests of every kernel, which implementations there are and when their results are
the expected ones; runs on a CPU the products that torch has on GPUs alone."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.block_scaled import BlockScaled
from lather.torch_private import TorchDispatchMode

try:
    import triton
except ModuleNotFoundError:
    triton = None

INTERPRETER = pytest.mark.skipif(
    triton is None or torch.cuda.is_available(),
    reason="needs Triton's interpreter; tests/gpu has the devices",
)
# the interpreter cuts bits off where bf16 should be rounded
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: 8e-3,
}


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


def bits_of_fp8(scaled: BlockScaled) -> list[Tensor]:
    """Return the bits of values and scales; a NaN has many, of which one is taken."""
    values = torch.where(scaled.values.float().isnan(), 127, scaled.values.view(torch.uint8))
    return [values, scaled.scales.nan_to_num(nan=-1.0, posinf=torch.inf).view(torch.int32)]


def multiplying_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter multiply bf16 matrices in fp32: it takes their bits for
    integers."""
    if triton is None:
        return
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    multiply = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        bf16, fp32 = triton.language.bfloat16, triton.language.float32
        wide = (self.cast_impl(x, fp32) if x.dtype.scalar == bf16 else x for x in (a, b))
        return multiply(self, *wide, *others)

    monkeypatch.setattr(builder, "create_dot", dot)


def plain_cross_entropy(
    logits: Tensor, labels: Tensor, z_loss: float = 0.0, normalizer: float = 1.0
) -> Tensor:
    """Compute the formula of the losses in fp64."""
    logits = logits.double()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return (total + z_loss * (logits.logsumexp(-1) * (labels != -100)).square().sum()) / normalizer


def with_gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error, relative to the largest element of each tensor."""
    assert [x.shape for x in actual] == [x.shape for x in expected]
    pairs = [
        (a.detach().double(), b.detach().double()) for a, b in zip(actual, expected, strict=True)
    ]
    return max(
        float((a - b).abs().max() / (b.abs().max() if b.any() else 1))
        for a, b in pairs
        if b.numel()
    )


class WideProducts(TorchDispatchMode):
    """Computes products with `out_dtype` on the CPU as tensor cores do, with fp32 sums of 16-bit
    operands, and counts the calls of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().removeprefix("aten::")] += 1
        if func is torch.ops.aten.mm.dtype:
            a, b, dtype = args
            return a.to(dtype) @ b.to(dtype)
        if func is torch.ops.aten.addmm.dtype_out:
            total, a, b, dtype = args
            assert kwargs["out"] is total
            return total.addmm_(a.to(dtype), b.to(dtype))
        return func(*args, **(kwargs or {}))
