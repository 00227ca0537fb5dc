"""RMSNorm, rotary embedding and attention against their formulas in fp64."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from lather.models.layers import RMSNorm, causal_attention, rotary_angles, rotate_pairs
from models.tiny import error, random_normal

CPU = torch.device("cpu")


def rotate_at(x_R: Tensor, position: int, theta: float = 100.0) -> Tensor:
    """One head's vector, rotated at this position."""
    angles = rotary_angles(position + 1, len(x_R), theta, CPU)[-1:]
    return rotate_pairs(x_R[None, None, None], angles).flatten()


def test_rms_norm_is_its_formula() -> None:
    norm = RMSNorm(5, eps=0.3).double()
    torch.nn.init.uniform_(norm.weight, -2, 2, generator=torch.Generator().manual_seed(0))
    x = random_normal(2, 3, 5)
    expected = torch.stack([row / math.sqrt((row @ row).item() / 5 + 0.3) for row in x.view(6, 5)]).view(2, 3, 5) * norm.weight
    assert error(norm(x), expected) < 1e-14


def test_rms_norm_squares_in_fp32() -> None:
    """1000^2 is beyond fp16."""
    normed = RMSNorm(4, eps=1e-6).half()(torch.tensor([[1000.0, -1000.0, 1000.0, 1000.0]], dtype=torch.float16))
    assert normed.dtype == torch.float16
    assert normed.tolist() == [[1, -1, 1, 1]]


def test_rotation_is_complex_multiplication_of_neighbouring_pairs() -> None:
    x, angles = random_normal(2, 5, 3, 6), rotary_angles(5, 6, 10.0, CPU)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * turn).flatten(-2)
    assert error(rotate_pairs(x, angles), expected) < 1e-14


@pytest.mark.parametrize("distance", [0, 1, 7, -3])
def test_rotated_dot_products_depend_on_the_distance_alone(distance: int) -> None:
    q, k = random_normal(6, seed=1), random_normal(6, seed=2)
    dots = [float(rotate_at(q, position) @ rotate_at(k, position + distance)) for position in (3, 4, 50, 1000)]
    assert max(dots) - min(dots) < 1e-10
    other = float(rotate_at(q, 3) @ rotate_at(k, 3 + distance + 1))
    assert abs(dots[0] - other) > 1e-2


@pytest.mark.parametrize("position", [0, 1, 12345])
def test_rotation_keeps_the_norm_of_every_pair(position: int) -> None:
    x = random_normal(8)
    assert error(rotate_at(x, position).view(4, 2).norm(dim=1), x.view(4, 2).norm(dim=1)) < 1e-14


def test_position_zero_is_not_rotated() -> None:
    x = random_normal(6)
    assert torch.equal(rotate_at(x, 0), x)


@pytest.mark.parametrize("position", [1, 4095, 1_000_000])
def test_angles_are_exact_to_fp64_rounding(position: int) -> None:
    size, theta = 8, 10000.0
    with localcontext() as context:
        context.prec = 50
        exact = [float(position * Decimal(theta) ** (-Decimal(2 * i) / size)) for i in range(size // 2)]
    assert rotary_angles(position + 1, size, theta, CPU)[-1].tolist() == pytest.approx(exact, rel=1e-15)


def test_fp32_vectors_are_rotated_exactly_at_a_large_position() -> None:
    """Angles in fp32 would be off by 0.03 here."""
    x, position = random_normal(6), 1_000_000
    assert error(rotate_at(x.float(), position).double(), rotate_at(x, position)) < 3e-7


def plain_attention(q_BSHN: Tensor, k_BSHN: Tensor, v_BSHU: Tensor) -> Tensor:
    """Softmax over the earlier positions, a head and a position at a time."""
    y = torch.zeros(v_BSHU.shape, dtype=v_BSHU.dtype)
    for b, s, h in torch.cartesian_prod(*(torch.arange(size) for size in v_BSHU.shape[:3])).tolist():
        scores = k_BSHN[b, : s + 1, h] @ q_BSHN[b, s, h] / math.sqrt(q_BSHN.shape[-1])
        y[b, s, h] = scores.softmax(0) @ v_BSHU[b, : s + 1, h]
    return y


@pytest.mark.parametrize("value_width", [1, 4, 6, 9])
def test_causal_attention_is_a_plain_softmax_whatever_the_width_of_values(value_width: int) -> None:
    shapes = [(2, 5, 3, 6), (2, 5, 3, 6), (2, 5, 3, value_width)]
    inputs = [random_normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    actual, expected = causal_attention(*inputs), plain_attention(*inputs)
    assert error(actual, expected) < 1e-13
    cotangent = random_normal(*expected.shape, seed=9)
    for ours, plain in zip(torch.autograd.grad(actual, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True):
        assert error(ours, plain) < 1e-13
