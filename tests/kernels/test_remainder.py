"""The two halves of fp32 weights: bf16 weights and remainders, against numpy and torch's
rounding."""

from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.implementations import on_each
from lather.kernels import remainder
from lather.kernels.remainder import reference

try:
    from lather.kernels.remainder import triton as kernels
except ModuleNotFoundError:
    kernels = None

INTERESTING = [
    half << 16 | low
    for sign in (0, 0x8000)
    for half in (sign + x for x in (0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80))
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    if half & 0x7FFF != 0x7F80 or low == 0  # the others are NaN
]
"""Bits of zeros, denormals, powers of two with their neighbors, the largest numbers, infinities; of
each, no remainder, the smallest, the largest, and the tie."""


def numbers() -> torch.Tensor:
    """Return fp32 numbers of all sizes, without NaN."""
    chosen = np.random.default_rng(0).integers(0, 2**32, 60_000, dtype=np.uint32)
    bits = np.concatenate([np.array(INTERESTING, dtype=np.uint32), chosen])
    x = torch.from_numpy(bits.view(np.float32))
    return x[~x.isnan()]


def halves(implementation: ModuleType, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w, r = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    implementation.split(x, w, r)
    return w, r


@on_each(reference, kernels)
def test_two_halves_are_exactly_the_number(implementation: ModuleType) -> None:
    x = numbers()
    joined = torch.empty_like(x)
    implementation.join(*halves(implementation, x), joined)
    assert torch.equal(joined.view(torch.int32), x.view(torch.int32))


@on_each(reference, kernels)
def test_the_weight_is_the_nearest_in_bf16(implementation: ModuleType) -> None:
    """torch rounds ties to the even neighbor; here they go away from zero."""
    x = numbers()
    w, r = halves(implementation, x)
    tie = r == -(2**15)
    assert 16 <= tie.sum() < 40
    assert torch.equal(w[~tie], x[~tie].bfloat16())
    finite = tie & w.isfinite()
    x, w = x[finite].double(), w[finite].double()
    assert (w.abs() > x.abs()).all()
    assert torch.equal((w - x).abs(), (x.float().bfloat16().double() - x).abs())


@on_each(reference, kernels)
def test_nan_stays_and_a_weight_set_to_zero_is_no_nan(implementation: ModuleType) -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    w, _ = halves(implementation, bits.view(torch.float32))
    assert w.isnan().all()
    zero = torch.tensor([0.0, -0.0, 0.0], dtype=torch.bfloat16)
    x = torch.empty(3)
    implementation.join(zero, torch.tensor([-1, -(2**15), 2**15 - 1], dtype=torch.int16), x)
    assert (x.abs() < 1e-40).all()


@pytest.mark.parametrize("shape", [(), (0, 3), (63,), (5, 500)])
def test_any_shape_and_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).movedim(0, -1) if len(shape) > 1 else torch.randn(shape)
    w, r = torch.empty_like(x, dtype=torch.bfloat16), torch.empty(x.shape, dtype=torch.int16)
    remainder.split(x, w, r)
    assert torch.equal(w, x.bfloat16())
    assert torch.equal(remainder.join(w, r), x)
