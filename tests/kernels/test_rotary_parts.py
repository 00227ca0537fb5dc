"""Heads of which a part is rotated, and heads that share a rotary key, against the composition of
torch's operations under autograd; the Triton kernels, in the interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, TOLERANCE, assert_close, is_close, on_each
from lather.kernels.rotary import (
    join_shared_key,
    reference,
    rotate,
    rotate_part,
    validate_shared_key,
)

try:
    from lather.kernels.rotary import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
HALVES = pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])
LAST = pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["one row", "packed"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# B, S, H, N, R, U
SIZES = [(2, 5, 3, 20, 6, 9), (1, 7, 1, 1, 2, 1), (2, 3, 40, 130, 64, 70), (2, 0, 3, 4, 2, 4)]


class Drawn:
    """Heads, a shared key, gradients and tables. With `packed` each sequence has positions of its
    own."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, *, packed: bool = True) -> None:
        b, s, h, n, r, u = sizes
        self._generator, self.dtype = torch.Generator().manual_seed(sum(sizes)), dtype
        self.x, self.grad_x = self._normal(b, s, h, n + r), self._normal(b, s, h, n + r)
        self.kv, self.k = self._normal(b, s, h, n + u), self._normal(b, s, r)
        self.grad_k, self.grad_v = self._normal(b, s, h, n + r), self._normal(b, s, h, u)
        shape, wide = (b if packed else 1, s, r // 2), torch.promote_types(dtype, torch.float32)
        angles = 6 * torch.rand(shape, generator=self._generator, dtype=torch.float64)
        self.tables = angles.cos().to(wide), angles.sin().to(wide)
        self.size = n

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)


def composed_part(x: Tensor, *tables: Tensor, last: bool, **options: bool) -> Tensor:
    """Rotate by a split, a rotation and a concatenation."""
    width = 2 * tables[0].shape[-1]
    if last:
        rest, part = x.split((x.shape[-1] - width, width), dim=-1)
        return torch.cat((rest, rotate(part, *tables, **options)), dim=-1)
    part, rest = x.split((width, x.shape[-1] - width), dim=-1)
    return torch.cat((rotate(part, *tables, **options), rest), dim=-1)


def composed_keys(
    kv: Tensor, k: Tensor, *tables: Tensor, size: int, **options: bool
) -> tuple[Tensor, Tensor]:
    """Join a rotated key, repeated to all heads, to those of the heads."""
    rest, values = kv.split((size, kv.shape[-1] - size), dim=-1)
    turned = rotate(k.unsqueeze(2), *tables, **options).expand(-1, -1, kv.shape[2], -1)
    return torch.cat((rest, turned), dim=-1), values


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def assert_equal(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@HALVES
@LAST
@PACKED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@DTYPES
def test_a_part_has_the_bits_of_the_composition(
    dtype: torch.dtype, sizes: tuple[int, ...], packed: bool, last: bool, halves: bool
) -> None:
    drawn, results = Drawn(sizes, dtype, packed=packed), []
    for function in (rotate_part, composed_part):
        (x,) = leaves(drawn.x)
        y = function(x, *drawn.tables, halves=halves, last=last)
        results.append((y.detach(), *torch.autograd.grad(y, x, drawn.grad_x)))
    assert_equal(*results)


@HALVES
@PACKED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_shared_key_has_the_bits_of_the_composition(
    sizes: tuple[int, ...], packed: bool, halves: bool
) -> None:
    drawn, results = Drawn(sizes, torch.float32, packed=packed), []
    for function in (join_shared_key, composed_keys):
        inputs = leaves(drawn.kv, drawn.k)
        heads = function(*inputs, *drawn.tables, halves=halves, size=drawn.size)
        gradients = torch.autograd.grad(heads, inputs, (drawn.grad_k, drawn.grad_v))
        results.append((*(x.detach() for x in heads), *gradients))
    assert_equal(*results)


@HALVES
def test_the_gradient_of_a_narrow_shared_key_is_rounded_once(halves: bool) -> None:
    drawn = Drawn((2, 5, 48, 20, 6, 9), torch.bfloat16)
    inputs = leaves(drawn.kv, drawn.k)
    heads = join_shared_key(*inputs, *drawn.tables, halves=halves, size=drawn.size)
    expected = composed_keys(
        *(x.detach() for x in inputs), *drawn.tables, halves=halves, size=drawn.size
    )
    assert_equal([x.detach() for x in heads], expected)
    actual = torch.autograd.grad(heads, inputs, (drawn.grad_k, drawn.grad_v))
    wide = leaves(drawn.kv.double(), drawn.k.double())
    tables = [table.double() for table in drawn.tables]
    exact_heads = composed_keys(*wide, *tables, halves=halves, size=drawn.size)
    exact = torch.autograd.grad(exact_heads, wide, (drawn.grad_k.double(), drawn.grad_v.double()))
    assert_equal(actual, [x.bfloat16() for x in exact])


@HALVES
@PACKED
def test_gradients_are_those_of_finite_differences(packed: bool, halves: bool) -> None:
    drawn = Drawn((2, 2, 3, 4, 6, 5), torch.float64, packed=packed)
    (x,) = leaves(drawn.x)
    for last in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, last=last: rotate_part(x, *drawn.tables, halves=halves, last=last), x
        )
    assert torch.autograd.gradcheck(
        lambda kv, k: join_shared_key(kv, k, *drawn.tables, halves=halves, size=drawn.size),
        leaves(drawn.kv, drawn.k),
    )


@pytest.mark.parametrize("used", [0, 1], ids=["keys alone", "values alone"])
def test_heads_that_are_not_used_have_a_gradient_of_zero(used: int) -> None:
    drawn, results = Drawn(SIZES[0], torch.float32), []
    for function in (join_shared_key, composed_keys):
        inputs = leaves(drawn.kv, drawn.k)
        heads = function(*inputs, *drawn.tables, halves=False, size=drawn.size)
        gradients = torch.autograd.grad(heads[used].square().sum(), inputs, allow_unused=True)
        results.append([torch.zeros_like(drawn.k) if x is None else x for x in gradients])
    assert_equal(*results)


def test_autograd_keeps_the_tables_alone_and_values_are_a_view() -> None:
    drawn, saved = Drawn(SIZES[0], torch.bfloat16), list[Tensor]()
    x, kv, k = leaves(drawn.x, drawn.kv, drawn.k)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rotate_part(x, *drawn.tables, halves=False, last=True)
        _, v = join_shared_key(kv, k, *drawn.tables, halves=False, size=drawn.size)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in drawn.tables}
    assert v.data_ptr() == kv[..., drawn.size :].data_ptr()
    assert v.stride() == kv.stride()


def test_a_shared_key_of_another_dtype_is_promoted() -> None:
    drawn = Drawn(SIZES[0], torch.bfloat16)
    arguments = drawn.kv.float(), drawn.k, *drawn.tables
    actual = join_shared_key(*arguments, halves=True, size=drawn.size)
    assert actual[0].dtype == torch.float32
    assert_equal(actual, composed_keys(*arguments, halves=True, size=drawn.size))


@INTERPRETER
@HALVES
@PACKED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_triton_against_the_reference(
    dtype: torch.dtype, sizes: tuple[int, ...], packed: bool, halves: bool
) -> None:
    drawn = Drawn(sizes, dtype, packed=packed)
    for last in (False, True):
        options = {"halves": halves, "last": last, "back": last == packed}
        results = [each.turn(drawn.x, *drawn.tables, **options) for each in (triton, reference)]
        assert results[0].dtype == dtype
        assert_close(*results, dtype)
    own = drawn.kv[..., : drawn.size]
    keys = [
        each.join_keys(own, drawn.k, *drawn.tables, halves=halves) for each in (triton, reference)
    ]
    assert_close(*keys, dtype)
    gradients = [
        each.keys_gradient(drawn.grad_k, drawn.grad_v, *drawn.tables, halves=halves)
        for each in (triton, reference)
    ]
    for actual, expected in zip(*gradients, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)
    assert gradients[0][0].equal(gradients[1][0])  # copied


@IMPLEMENTATIONS
@HALVES
def test_other_layouts(implementation: ModuleType, halves: bool) -> None:
    """Layouts: heads before positions, parts of wider tensors, columns that are not neighbors, a
    gradient that is one number."""
    drawn = Drawn(SIZES[0], torch.float32)

    def others(x: Tensor) -> list[Tensor]:
        by_head = x.transpose(1, 2).contiguous().transpose(1, 2)
        across = x.transpose(1, -1).contiguous().transpose(1, -1)
        wider = torch.cat((torch.full_like(x, torch.nan), x), dim=-1)[..., x.shape[-1] :]
        return [by_head, across, wider]

    options = {"halves": halves, "last": True}
    expected = implementation.turn(drawn.x, *drawn.tables, **options)
    for x in others(drawn.x):
        assert_equal([implementation.turn(x, *drawn.tables, **options)], [expected])
    own = drawn.kv[..., : drawn.size].contiguous()
    expected = implementation.join_keys(own, drawn.k, *drawn.tables, halves=halves)
    for same, k in zip(others(own), others(drawn.k), strict=True):
        actual = implementation.join_keys(same, k, *drawn.tables, halves=halves)
        assert_equal([actual], [expected])
    both = drawn.grad_k, drawn.grad_v
    expected = implementation.keys_gradient(*both, *drawn.tables, halves=halves)
    for grads in zip(*map(others, both), strict=True):
        assert_equal(implementation.keys_gradient(*grads, *drawn.tables, halves=halves), expected)
    ones = [torch.ones(()).expand_as(x) for x in both]
    assert_equal(
        implementation.keys_gradient(*ones, *drawn.tables, halves=halves),
        implementation.keys_gradient(*(x.contiguous() for x in ones), *drawn.tables, halves=halves),
    )


@IMPLEMENTATIONS
@HALVES
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_place(
    implementation: ModuleType, value: float, halves: bool
) -> None:
    """A pair carries it to its own two columns, and nothing else does."""
    drawn, token, head = Drawn(SIZES[0], torch.float32), (1, 3), 2
    first, second = (2, 5) if halves else (4, 5)  # of the columns of pair 2
    pair, size = [drawn.size + first, drawn.size + second], drawn.size
    for bad in (0, drawn.size + first):
        x = drawn.x.clone()
        x[*token, head, bad] = value
        y = implementation.turn(x, *drawn.tables, halves=halves, last=True)
        wrong = torch.zeros_like(y, dtype=torch.bool)
        wrong[*token, head, [bad] if bad < size else pair] = True
        assert y.isfinite().logical_not().equal(wrong)
        grad_kv, grad_k = implementation.keys_gradient(
            x, drawn.grad_v, *drawn.tables, halves=halves
        )
        assert int(grad_kv.isfinite().logical_not().sum()) == (bad < size)
        wrong_k = torch.zeros_like(grad_k, dtype=torch.bool)
        wrong_k[*token, [] if bad < size else [first, second]] = True
        assert grad_k.isfinite().logical_not().equal(wrong_k)
    k = drawn.k.clone()
    k[*token, first] = value
    y = implementation.join_keys(drawn.kv[..., :size], k, *drawn.tables, halves=halves)
    wrong = torch.zeros_like(y, dtype=torch.bool)
    wrong[*token, :, pair] = True
    assert y.isfinite().logical_not().equal(wrong)


def test_a_gradient_without_a_head_is_rejected() -> None:
    """One of 40 heads that is left out of the sum is seen, as an error of 1 % is."""
    drawn = Drawn(SIZES[2], torch.bfloat16)
    _, expected = reference.keys_gradient(drawn.grad_k, drawn.grad_v, *drawn.tables, halves=False)
    _, wrong = reference.keys_gradient(
        drawn.grad_k[:, :, 1:], drawn.grad_v[:, :, 1:], *drawn.tables, halves=False
    )
    assert not is_close(wrong, expected, torch.bfloat16)


def test_errors_say_the_remedy() -> None:
    x, table = torch.zeros(2, 6, 3, 8), torch.zeros(1, 6, 5)
    with pytest.raises(ValueError, match="at least 2 P"):
        rotate_part(x, table, table, halves=False)
    with pytest.raises(ValueError, match=r"\(B, S, H, 2 P\)"):
        rotate(x, table[..., :3], table[..., :3], halves=False)
    key, table = torch.zeros(2, 6, 4), table[..., :2]
    for kv, size in ((x[:1], 3), (x[0], 3), (x, 9), (x, -1)):
        with pytest.raises(ValueError, match="at least as many columns"):
            validate_shared_key(kv, key, table, table, size)
    for wrong in (key[..., :2], key.unsqueeze(2)):
        with pytest.raises(ValueError, match=r"shared key \(B, S, 2 P\), here P = 2"):
            validate_shared_key(x, wrong, table, table, 3)
    with pytest.raises(ValueError, match="both tables"):
        validate_shared_key(x, key, table[:, :3], table[:, :3], 3)
