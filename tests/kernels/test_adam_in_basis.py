"""Adam in the basis: the reference has the bits of torch's own operations, Triton is the reference
to 1e-6, and the optimizers use it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from in_turn import in_turn
from lather.kernels import adam_in_basis as op
from lather.kernels.adam_in_basis import adam_in_basis, reference
from lather.optim import KLSOAP, SOAP, MatrixOptimizer
from lather.optim.functional import adam_update

pytest.importorskip("triton")
from lather.kernels.adam_in_basis import triton

SHAPES = [(3, 21, 33), (63,), (500, 5), (1,), (0, 4), ()]
BETAS, EPS = (0.9, 0.95), 1e-8
PLAIN: dict[str, Any] = {"betas": BETAS, "eps": EPS, "correct_bias": True, "nesterov": False}
OPTIONS = [
    {"correct_bias": c, "nesterov": n} for c, n in itertools.product([True, False], repeat=2)
]


def tensors(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, moments: torch.dtype | None = None
) -> list[Tensor]:
    """Draw a gradient and two moments that are not zero."""
    generator = torch.Generator().manual_seed(0)
    g, m, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return [g.to(dtype), (m * 0.1).to(moments or dtype), (v.square() * 0.01).to(moments or dtype)]


def old(g: Tensor, m: Tensor, v: Tensor, t: int, *, correct_bias: bool, nesterov: bool) -> Tensor:
    """Run the operations of torch with which earlier optimizer states were made."""
    (beta1, beta2), eps = BETAS, EPS
    c1, c2, next_c1 = (1 - beta**step for beta, step in ((beta1, t), (beta2, t), (beta1, t + 1)))
    if not correct_bias:
        c1 = c2 = next_c1 = 1.0
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if nesterov:
        numerator = (m * (beta1 / next_c1)).add_(g, alpha=(1 - beta1) / c1)
        return numerator / v.sqrt().mul_(1 / math.sqrt(c2)).add_(eps)
    return m / v.sqrt().mul_(c1 / math.sqrt(c2)).add_(eps * c1)


def assert_near(actual: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=rtol * (float(b.abs().max()) if b.numel() else 1.0)
        )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_reference_keeps_its_bits(dtype: torch.dtype, options: dict[str, bool]) -> None:
    (g, m, v), (_, m_old, v_old) = tensors((3, 21, 33), dtype), tensors((3, 21, 33), dtype)
    before = g.clone()
    for t in range(1, 4):
        expected = old(g, m_old, v_old, t, **options)
        assert torch.equal(adam_update(g, m, v, t, betas=BETAS, eps=EPS, **options), expected)
        assert torch.equal(m, m_old)
        assert torch.equal(v, v_old)
    assert torch.equal(g, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("options", "betas"), in_turn(OPTIONS, [(0.9, 0.95), (0.3, 0.999), (0.0, 0.0)], each=2), ids=str
)
def test_triton_is_the_reference(
    shape: tuple[int, ...], options: dict[str, bool], betas: tuple[float, float]
) -> None:
    results = []
    for module in (reference, triton):
        g, m, v = tensors(shape)
        u = [
            module.adam_in_basis(g, m, v, t, betas=betas, eps=1e-8, **options) for t in (1, 2, 1000)
        ]
        assert torch.equal(g, tensors(shape)[0])
        results.append([*u, m, v])
    assert_near(results[1], results[0], 1e-6)
    if math.prod(shape):
        with pytest.raises(AssertionError):
            assert_near([1.01 * x for x in results[1]], results[0], 1e-3)


@pytest.mark.parametrize("module", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_moments_are_rounded_after_the_direction_is_made(
    module: Any, moments: torch.dtype
) -> None:
    g, m, v = tensors((63, 5), moments=moments)
    wide = [g, m.float(), v.float()]
    options = PLAIN | {"nesterov": True}
    expected = reference.adam_in_basis(*wide, 3, **options)
    u = module.adam_in_basis(g, m, v, 3, **options)
    assert_near([u], [expected], 1e-6)
    assert_near([m, v], [x.to(moments) for x in wide[1:]], torch.finfo(moments).eps)


@pytest.mark.parametrize("shape", [(3, 21, 33), (4, 500), (1, 1), (0, 4)], ids=str)
def test_each_matrix_may_have_its_own_eps(shape: tuple[int, ...]) -> None:
    eps = torch.tensor([0.3, 1e-8, 2.0, 0.05])[: shape[0]]
    options: dict[str, Any] = {"betas": (0.3, 0.95), "correct_bias": True, "nesterov": False}
    whole = tensors(shape)
    alone = [x.clone() for x in whole]
    u = reference.adam_in_basis(*whole, 2, eps=eps, **options)
    for row, of_row in enumerate(eps.tolist()):
        expected = reference.adam_in_basis(*(x[row] for x in alone), 2, eps=of_row, **options)
        assert_near([u[row]], [expected], 1e-6)
    again = tensors(shape)
    assert_near([triton.adam_in_basis(*again, 2, eps=eps, **options), *again], [u, *whole], 1e-6)


def test_a_gradient_of_zeros_on_moments_of_zeros_gives_zeros() -> None:
    for module in (reference, triton):
        zeros = [torch.zeros(5) for _ in range(3)]
        assert not module.adam_in_basis(*zeros, 1, **PLAIN).any()


@pytest.mark.parametrize("strided", ["gradient", "moments", "all"])
def test_any_strides(strided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a stack, a transposed gradient, moments with gaps: results are the same, and nothing
    beside the tensors is touched."""
    monkeypatch.setattr(op, "_has_kernel_for", lambda g: True)
    g, m, v = tensors((6, 9, 4))
    expected_u = reference.adam_in_basis(g, m, v, 2, **PLAIN)
    g, m_stack, v_stack = tensors((6, 9, 4))
    if strided in ("gradient", "all"):
        g = g.movedim(1, 2).contiguous().movedim(2, 1)
    if strided in ("moments", "all"):
        m_stack, v_stack = (torch.stack([x, torch.full_like(x, 7)], -1) for x in (m_stack, v_stack))
        m_view, v_view = m_stack[2:5, ..., 0], v_stack[2:5, ..., 0]
    else:
        m_view, v_view = m_stack[2:5], v_stack[2:5]
    u = adam_in_basis(g[2:5], m_view, v_view, 2, betas=BETAS, eps=EPS)
    assert_near([u, m_view, v_view], [expected_u[2:5], m[2:5], v[2:5]], 1e-6)
    if m_stack.dim() == 4:
        assert (m_stack[..., 1] == 7).all()
    untouched = tensors((6, 9, 4))[1]
    assert torch.equal(m_stack.view(6, 9, 4, -1)[:2, ..., 0], untouched[:2])


def test_fp64_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_has_kernel_for", lambda g: True)
    expected = reference.adam_in_basis(*tensors((5,), torch.float64), 1, **PLAIN)
    for update in (adam_in_basis, adam_update):
        u = update(*tensors((5,), torch.float64), 1, betas=BETAS, eps=EPS)
        assert torch.equal(u, expected)


def trained(cls: type[MatrixOptimizer], **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in [(6, 9), (6, 9), (2, 5, 3), (7,)]
    ]
    optimizer = cls(params, lr=1e-2, precondition_frequency=2, **options)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("cls", [SOAP, KLSOAP], ids=["SOAP", "KLSOAP"])
@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_the_optimizers_take_the_fused_kernel(
    cls: type[MatrixOptimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(cls, **options)
    calls: list[Any] = []
    original = triton.adam_in_basis
    monkeypatch.setattr(
        triton, "adam_in_basis", lambda *args, **kw: calls.append(args) or original(*args, **kw)
    )
    monkeypatch.setattr(op, "_has_kernel_for", lambda g: True)
    actual = trained(cls, **options)
    assert len(calls) >= 8
    assert_near(actual, expected, 1e-2 if options else 1e-4)
