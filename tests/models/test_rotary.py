"""Rotary embedding against complex multiplication and exact arithmetic; YaRN against transformers'
frequencies and its own limits."""

from __future__ import annotations

import math
import re
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.errors import ConfigError
from lather.kernels.rotary import rotate_halves, rotate_pairs
from lather.models.rotary import Rotary, YarnConfig
from models.tiny import error, random_normal

CPU = torch.device("cpu")
ROTATIONS = [rotate_pairs, rotate_halves]


def tables_at(position: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
    return rotary.tables(torch.tensor([[position]]))


def rotate_at(rotate: Any, x_R: Tensor, position: int, theta: float = 100.0) -> Tensor:
    """Rotate one head's vector at this position."""
    turned: Tensor = rotate(x_R[None, None, None], *tables_at(position, Rotary(len(x_R), theta)))
    return turned.flatten()


def as_halves(x: Tensor) -> Tensor:
    """Move the coordinates of neighboring pairs to the places of pairs across the halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def test_rotation_is_complex_multiplication_of_neighboring_pairs() -> None:
    x, positions = random_normal(2, 5, 3, 6), torch.tensor([[0, 1, 2, 3, 4], [3, 4, 0, 1, 2]])
    angles = positions[..., None] * 10.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * turn).flatten(-2)
    tables = Rotary(6, 10.0).tables(positions)
    assert error(rotate_pairs(x, *tables), expected) < 1e-14
    assert error(rotate_halves(as_halves(x), *tables), as_halves(expected)) < 1e-14


def test_tables_of_one_row_serve_all_rows() -> None:
    x, positions = random_normal(2, 5, 3, 6), torch.arange(5)[None]
    tables, wide = (Rotary(6, 10.0).tables(each) for each in (positions, positions.expand(2, -1)))
    assert torch.equal(rotate_pairs(x, *tables), rotate_pairs(x, *wide))


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("distance", [0, 1, 7, -3])
def test_rotated_dot_products_depend_on_the_distance_alone(rotate: Any, distance: int) -> None:
    q, k = random_normal(6, seed=1), random_normal(6, seed=2)
    dots = [
        float(rotate_at(rotate, q, position) @ rotate_at(rotate, k, position + distance))
        for position in (3, 4, 50, 1000)
    ]
    assert max(dots) - min(dots) < 1e-10
    other = float(rotate_at(rotate, q, 3) @ rotate_at(rotate, k, 3 + distance + 1))
    assert abs(dots[0] - other) > 1e-2


@pytest.mark.parametrize("position", [0, 1, 12345])
def test_rotation_keeps_the_norm_of_every_pair(position: int) -> None:
    x = random_normal(8)
    for rotate, shape, dim in ((rotate_pairs, (4, 2), 1), (rotate_halves, (2, 4), 0)):
        rotated = rotate_at(rotate, x, position).view(shape)
        assert error(rotated.norm(dim=dim), x.view(shape).norm(dim=dim)) < 1e-14


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_position_zero_is_not_rotated(rotate: Any) -> None:
    x = random_normal(6)
    assert torch.equal(rotate_at(rotate, x, 0), x)


@pytest.mark.parametrize("position", [1, 4095, 1_000_000])
def test_angles_are_exact_to_fp64_rounding(position: int) -> None:
    size, theta = 8, 10000.0
    with localcontext() as context:
        context.prec = 50
        angles = [
            float(position * Decimal(theta) ** (-Decimal(2 * i) / size)) for i in range(size // 2)
        ]
    for table, function in zip(
        tables_at(position, Rotary(size, theta)), (math.cos, math.sin), strict=True
    ):
        exact = [function(angle) for angle in angles]
        assert table.flatten().tolist() == pytest.approx(exact, abs=1e-15 * position)


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_narrow_vectors_are_rotated_exactly_and_rounded_once(rotate: Any) -> None:
    """Angles in fp32 would be off by 0.03 at this position."""
    x, position = random_normal(6), 1_000_000
    narrow = rotate_at(rotate, x.float(), position).double()
    assert error(narrow, rotate_at(rotate, x, position)) < 3e-7
    rotated = rotate_at(rotate, x.bfloat16(), 77)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate_at(rotate, x.bfloat16().double(), 77).bfloat16())


YARNS = [
    YarnConfig(),
    YarnConfig(4.0, 64),
    YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5),
    YarnConfig(4.0, 64, beta_fast=4.0, beta_slow=0.5, truncate=False),
    YarnConfig(40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
    YarnConfig(40.0, 4096, mscale=0.707),
    YarnConfig(40.0, 4096, mscale=0.707, mscale_all_dim=0.0),
    YarnConfig(32.0, 4096, truncate=False),
    YarnConfig(32.0, 4096, attention_factor=0.9, mscale=2.0, mscale_all_dim=1.0),
    YarnConfig(2.0, 3, beta_fast=32.0, beta_slow=32.0),
    YarnConfig(2.0, 10**7),
]


@pytest.mark.parametrize("yarn", YARNS, ids=str)
@pytest.mark.parametrize(("size", "theta"), [(2, 50.0), (6, 50.0), (64, 10000.0), (64, 150000.0)])
def test_yarn_is_that_of_transformers(yarn: YarnConfig, size: int, theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {name: value for name, value in vars(yarn).items() if value is not None}
    config = transformers.GptOssConfig(
        head_dim=size, rope_parameters={"rope_type": "yarn", "rope_theta": theta, **fields}
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    rotary = Rotary(size, theta, yarn)
    assert ((rotary.frequencies(CPU) / frequencies.double() - 1).abs() < 2e-6).all()
    assert yarn.magnitude() == pytest.approx(magnitude, rel=1e-12)
    cos, sin = tables_at(3, rotary)
    assert error((cos.square() + sin.square()).sqrt(), torch.full_like(cos, magnitude)) < 1e-12


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_mixes_between() -> None:
    plain, stretched = (
        Rotary(64, 10000.0, yarn).frequencies(CPU) for yarn in (None, YarnConfig(40.0, 4096))
    )
    share = stretched / plain
    turns = 4096 * plain / (2 * math.pi)
    assert (share[turns > 33 * 10000 ** (1 / 32)] == 1).all()
    assert (share[turns < 10000 ** (-1 / 32)] - 1 / 40).abs().max() < 1e-15
    assert (share.diff() < 1e-15).all()
    assert ((share > 0.1) & (share < 0.9)).any()


def test_a_factor_of_one_changes_nothing() -> None:
    plain, stretched = Rotary(64, 10000.0), Rotary(64, 10000.0, YarnConfig(1.0, 4096))
    assert error(stretched.frequencies(CPU), plain.frequencies(CPU)) < 1e-15
    assert stretched.scaling is not None
    assert stretched.scaling.magnitude() == stretched.scaling.softmax_factor() == 1


BAD_YARN = [
    ("factor", 0.5, "at least 1"),
    ("factor", math.inf, "finite"),
    ("factor", math.nan, "at least 1"),
    ("original_max_position_embeddings", 0, "at least 1"),
    ("beta_fast", 0.5, "at least beta_slow (1.0)"),
    ("beta_fast", math.inf, "finite"),
    ("beta_slow", 0.0, "greater than 0"),
    ("beta_slow", math.nan, "greater than 0"),
    ("mscale", -1.0, "at least 0"),
    ("mscale_all_dim", math.inf, "finite"),
    ("attention_factor", 0.0, "greater than 0"),
    ("attention_factor", math.nan, "greater than 0"),
]


@pytest.mark.parametrize(("field", "bad", "constraint"), BAD_YARN)
def test_a_bad_value_is_refused_with_its_name_and_constraint(
    field: str, bad: float, constraint: str
) -> None:
    words = re.escape(f"model.rope_scaling.{field} = {bad!r} ") + f".*{re.escape(constraint)}"
    with pytest.raises(ConfigError, match=f"^{words}"):
        YarnConfig(**{field: bad})
