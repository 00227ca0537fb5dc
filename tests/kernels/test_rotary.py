"""The rotary turn against the formula under autograd; the Triton kernel, in the interpreter,
against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, assert_close, on_each
from lather.kernels.rotary import reference, rotate_halves, rotate_pairs, validate

try:
    from lather.kernels.rotary import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
HALVES = pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])
SHAPES = [(2, 63, 3, 10), (1, 5, 1, 2), (3, 7, 16, 64), (1, 1, 2, 300), (2, 0, 3, 4)]


def inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, shared: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x, both tables and the gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    batch, positions, _, width = shape
    angles = 6 * torch.rand(
        1 if shared else batch, positions, width // 2, generator=generator, dtype=torch.float64
    )
    wide = torch.promote_types(dtype, torch.float32)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, angles.cos().to(wide), angles.sin().to(wide), grad


def plain(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool) -> Tensor:
    """Compute the turn as a product of complex numbers."""
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else x.unflatten(-1, (-1, 2))
    product = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos, sin).unsqueeze(-2)
    turned = torch.stack((product.real, product.imag), dim=-1)
    return turned.transpose(-1, -2).flatten(-2) if halves else turned.flatten(-2)


@IMPLEMENTATIONS
@HALVES
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back_against_autograd_of_the_formula(
    implementation: ModuleType, shape: tuple[int, int, int, int], shared: bool, halves: bool
) -> None:
    x, cos, sin, grad = inputs(shape, torch.float64, shared=shared)
    leaf = x.clone().requires_grad_()
    expected = plain(leaf, cos, sin, halves=halves)
    assert_close(implementation.turn(x, cos, sin, halves=halves), expected.detach(), torch.float64)
    (gradient,) = torch.autograd.grad(expected, leaf, grad)
    assert_close(
        implementation.turn(grad, cos, sin, halves=halves, back=True), gradient, torch.float64
    )


@INTERPRETER
@HALVES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_against_the_reference(dtype: torch.dtype, halves: bool) -> None:
    x, cos, sin, _ = inputs((2, 63, 3, 10), dtype)
    for back in (False, True):
        actual = triton.turn(x, cos, sin, halves=halves, back=back)
        assert actual.dtype == dtype
        assert_close(actual, reference.turn(x, cos, sin, halves=halves, back=back), dtype)


@IMPLEMENTATIONS
@HALVES
def test_other_layouts(implementation: ModuleType, halves: bool) -> None:
    """Layouts: a part of wider heads, heads before positions, columns that are not neighbors, and
    one head for all."""
    x, cos, sin, _ = inputs((2, 6, 3, 8), torch.float32)
    wider = torch.cat((torch.full((2, 6, 3, 5), torch.nan), x), dim=-1)
    by_head, across = (
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.transpose(1, 3).contiguous().transpose(1, 3),
    )
    for same in (wider[..., 5:], by_head, across):
        assert torch.equal(
            implementation.turn(same, cos, sin, halves=halves),
            implementation.turn(x, cos, sin, halves=halves),
        )
    shared = x[:, :, :1].expand(-1, -1, 3, -1)
    expected = implementation.turn(shared.contiguous(), cos, sin, halves=halves)
    assert torch.equal(implementation.turn(shared, cos, sin, halves=halves), expected)


@HALVES
def test_autograd_keeps_the_tables_alone_and_gives_the_bits_of_plain_autograd(halves: bool) -> None:
    x, cos, sin, grad = inputs((2, 63, 3, 10), torch.bfloat16)
    saved: list[Tensor] = []
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = (rotate_halves if halves else rotate_pairs)(leaves[0], cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}
    y.backward(grad)
    reference.turn(leaves[1], cos, sin, halves=halves).backward(grad)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_errors_say_the_remedy() -> None:
    for shape, table in (
        ((2, 6, 3, 8), (2, 6, 3)),
        ((2, 6, 3, 8), (3, 6, 4)),
        ((6, 3, 8), (1, 6, 4)),
        ((2, 6, 3, 7), (2, 6, 3)),
    ):
        with pytest.raises(ValueError, match="both tables"):
            validate(torch.zeros(shape), torch.zeros(table), torch.zeros(table))
