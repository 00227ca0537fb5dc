"""The gated activations against the plain formula under autograd; the Triton kernels, in the
interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.implementations import INTERPRETER, assert_close, bits_of_fp8, on_each
from lather.kernels import swiglu as op
from lather.kernels.backend import wide_dtype
from lather.kernels.block_scaled import BLOCK, BlockScaled, empty_rows, scaled_rows
from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU, Gate, reference, swiglu

try:
    from lather.kernels.swiglu import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)

GATES = [SWIGLU, CLAMPED_SWIGLU, Gate(alpha=1.3, offset=0.5, limit=0.7)]
GATE_IDS = ["swiglu", "clamped", "halves_clamped"]


def plain(gate_up: Tensor, gate: Gate) -> Tensor:
    """Apply the definition column by column, for autograd to differentiate."""
    num_columns = gate_up.shape[-1] // 2
    columns = []
    for f in range(num_columns):
        g, u = (
            (gate_up[..., 2 * f], gate_up[..., 2 * f + 1])
            if gate.interleaved
            else (gate_up[..., f], gate_up[..., num_columns + f])
        )
        if gate.limit is not None:
            g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
        columns.append(g / (1 + torch.exp(-gate.alpha * g)) * (u + gate.offset))
    return torch.stack(columns, -1)


def inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    gate_up = 4 * torch.randn(rows, 2 * columns, generator=generator)
    return (
        gate_up.to(dtype),
        torch.randn(rows, columns, generator=generator).to(dtype),
        torch.rand(rows, generator=generator),
    )


def backward(
    module: ModuleType, grad: Tensor, gate_up: Tensor, gate: Gate, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `gate_backward` does, in one of the implementations."""
    h = gate_up.new_empty(grad.shape)
    dot = None if scale is None else gate_up.new_zeros(len(gate_up), dtype=wide_dtype(gate_up))
    return module.gate_gradient(grad, gate_up, gate, scale, h, dot), h, dot


@pytest.mark.parametrize("gate", GATES, ids=GATE_IDS)
@pytest.mark.parametrize(("rows", "columns"), [(63, 5), (1, 1), (0, 4)])
def test_reference_against_autograd_of_the_definition(gate: Gate, rows: int, columns: int) -> None:
    gate_up, grad, scale = inputs(rows, columns, torch.float64)
    leaf, weight = gate_up.clone().requires_grad_(), scale.double().requires_grad_()
    h = plain(leaf, gate)
    assert_close(reference.gate_forward(gate_up, gate), h.detach(), torch.float64)

    (expected,) = torch.autograd.grad(h, leaf, grad, retain_graph=True)
    unscaled, product, nothing = backward(reference, grad, gate_up, gate)
    assert nothing is None
    assert_close(unscaled, expected, torch.float64)
    assert_close(product, h.detach(), torch.float64)
    assert_close(reference.gate_gradient(grad, gate_up, gate), expected, torch.float64)

    expected, expected_dot = torch.autograd.grad(weight.unsqueeze(1) * h, (leaf, weight), grad)
    scaled, product, dot = backward(reference, grad, gate_up, gate, scale)
    assert dot is not None
    assert_close(scaled, expected, torch.float64)
    assert_close(product, (weight.unsqueeze(1) * h).detach(), torch.float64)
    assert_close(dot, expected_dot, torch.float64)


def test_blocks_of_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, grad, scale = inputs(63, 7, torch.float32)
    whole = backward(reference, grad, gate_up, SWIGLU, scale)
    monkeypatch.setattr(reference, "BLOCK", 40)
    in_blocks = backward(reference, grad, gate_up, SWIGLU, scale)
    for actual, expected in zip(in_blocks, whole, strict=True):
        torch.testing.assert_close(actual, expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", GATES, ids=GATE_IDS)
def test_clamped_and_saturated_values(implementation: ModuleType, gate: Gate) -> None:
    """Values lie at, above and far above the limit; nothing overflows, and a NaN is not clamped
    away."""
    values = torch.tensor([-200.0, -7.0, -0.7, 0.0, 0.7, 7.0, 7.5, 200.0], dtype=torch.float64)
    gate_up = torch.cartesian_prod(values, values)
    grad = torch.ones(len(gate_up), 1, dtype=torch.float64)
    leaf = gate_up.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(leaf, gate), leaf, grad)
    torch.testing.assert_close(implementation.gate_gradient(grad, gate_up, gate), expected)
    poisoned = torch.tensor([[float("nan"), 1.0], [1.0, float("nan")]])
    assert implementation.gate_forward(poisoned, gate).isnan().all()


@INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES, ids=GATE_IDS)
@pytest.mark.parametrize(("rows", "columns"), [(63, 33), (3, 1500), (500, 4), (1, 1), (0, 4)])
def test_triton_against_the_reference(
    gate: Gate, rows: int, columns: int, dtype: torch.dtype
) -> None:
    gate_up, grad, scale = inputs(rows, columns, dtype)
    assert_close(triton.gate_forward(gate_up, gate), reference.gate_forward(gate_up, gate), dtype)
    assert_close(
        triton.gate_gradient(grad, gate_up, gate),
        reference.gate_gradient(grad, gate_up, gate),
        dtype,
    )
    for actual, expected in zip(
        backward(triton, grad, gate_up, gate, scale),
        backward(reference, grad, gate_up, gate, scale),
        strict=True,
    ):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, dtype)


@INTERPRETER
@pytest.mark.usefixtures("_exact_fp8")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES, ids=GATE_IDS)
@pytest.mark.parametrize("columns", [8, BLOCK])
def test_a_gradient_that_is_not_finite_is_seen_at_clamped_places_too(
    gate: Gate, columns: int, dtype: torch.dtype
) -> None:
    """Every gradient meets every pair of places below, at and above the limits. With weights of
    rows, in the dtype alone and in FP8, the same results are not finite in both implementations."""
    limits = torch.tensor([-200.0, -7.5, -0.5, 0.0, 0.5, 7.5, 200.0, torch.nan])
    gate_up = torch.cartesian_prod(limits, limits).to(dtype)
    gate_up = gate_up if gate.interleaved else gate_up.repeat_interleave(columns, 1)
    gate_up = gate_up.repeat(1, columns if gate.interleaved else 1)
    grad = torch.tensor([1.0, 0.0, torch.nan, torch.inf, -torch.inf, 2.0, 3.0, 4.0], dtype=dtype)
    grad = grad.repeat(len(gate_up), columns // 8)
    scale = torch.linspace(0, 1, len(grad))
    for weights in (None, scale):
        results = []
        for module in (triton, reference):
            in_fp8 = None if dtype == torch.float64 else empty_rows(gate_up, 2 * columns)
            h, dot = torch.empty_like(grad), torch.zeros(len(grad), dtype=wide_dtype(gate_up))
            d = module.gate_gradient(grad, gate_up, gate, weights, h, dot, in_fp8)
            plain = module.gate_gradient(grad, gate_up, gate, weights, h, dot)
            assert d.nan_to_num(-1.0).equal(plain.nan_to_num(-1.0))
            scales = () if in_fp8 is None else (in_fp8.values.float(), in_fp8.scales)
            results.append((d, h, dot, *scales))
        for actual, expected in zip(*results, strict=True):
            assert actual.isnan().equal(expected.isnan())
            assert torch.where(actual.isinf(), actual, 0).equal(
                torch.where(expected.isinf(), expected, 0)
            )
    assert results[0][0].isnan().any()


def has_bits_of(found: BlockScaled, x: Tensor) -> bool:
    pairs = zip(bits_of_fp8(found), bits_of_fp8(scaled_rows(x)), strict=True)
    return all(a.equal(b) for a, b in pairs)


@IMPLEMENTATIONS
@pytest.mark.usefixtures("_exact_fp8")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES, ids=GATE_IDS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(37, 33), (7, BLOCK), (5, 3 * BLOCK // 2), (3, 9 * BLOCK), (1, 1), (0, 4)]
)
def test_results_in_fp8_have_the_bits_of_rounding_those_in_the_dtype(
    implementation: ModuleType, gate: Gate, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """A row with NaN, one with infinities, and one of zeros are among them. An error of 1 % would
    be seen in the scales."""
    gate_up, grad, scale = inputs(rows, columns, dtype)
    for row, value in ((2, torch.nan), (3, torch.inf)):
        gate_up[row : row + 1, columns] = value
    gate_up[4:5], scale[6:] = 0, torch.inf
    h = empty_rows(gate_up, columns)
    implementation.scaled_gate_forward(gate_up, gate, *h)
    expected = implementation.gate_forward(gate_up, gate)
    assert has_bits_of(h, expected)
    assert rows == 0 or not has_bits_of(h, 1.01 * expected.float())

    for weights in ((), (scale, torch.empty_like(grad), scale.clone())):
        in_fp8 = empty_rows(gate_up, 2 * columns)
        found = implementation.gate_gradient(
            grad, gate_up, gate, *(weights or (None, None, None)), in_fp8
        )
        assert has_bits_of(in_fp8, found)
        plain = implementation.gate_gradient(grad, gate_up, gate, *weights)
        assert found.nan_to_num(-1.0).equal(plain.nan_to_num(-1.0))


@IMPLEMENTATIONS
def test_other_layouts(implementation: ModuleType) -> None:
    """Layouts with three dims, and with rows that do not follow each other in memory."""
    gate_up, grad, _ = inputs(30, 6, torch.float32)
    for x, g in (
        (gate_up.view(5, 6, 12), grad.view(5, 6, 6)),
        (gate_up.t().contiguous().t(), grad[:1].expand(30, 6)),
    ):
        contiguous = backward(reference, g.contiguous(), x.contiguous(), CLAMPED_SWIGLU)
        for actual, expected in zip(
            backward(implementation, g, x, CLAMPED_SWIGLU)[:2], contiguous[:2], strict=True
        ):
            torch.testing.assert_close(actual, expected)


def test_public_operations_under_autograd() -> None:
    gate_up, _, _ = inputs(4, 3, torch.float64)
    leaf = gate_up.view(2, 2, 6).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (leaf,))
    assert torch.autograd.gradcheck(lambda x: swiglu(x, CLAMPED_SWIGLU), (leaf,))
    assert torch.autograd.gradcheck(
        lambda x: swiglu(x, Gate(1.1, 1.0, 0.9, interleaved=True)), (leaf,)
    )
    torch.testing.assert_close(swiglu(gate_up, CLAMPED_SWIGLU), plain(gate_up, CLAMPED_SWIGLU))
    gate, up = gate_up.float().chunk(2, -1)
    assert torch.equal(swiglu(gate_up.float()), F.silu(gate) * up)


@pytest.mark.parametrize("gate", GATES, ids=GATE_IDS)
def test_only_gate_up_is_saved(gate: Gate) -> None:
    gate_up = inputs(8, 4, torch.float32)[0].requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        swiglu(gate_up, gate)
    assert [x.data_ptr() for x in saved] == [gate_up.data_ptr()]


def test_errors_name_value_and_constraint() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"\(3, 5\).*even"):
        swiglu(torch.zeros(3, 5))
    with pytest.raises(TypeError, match=r"int64.*floating"):
        op.validate(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"grad_h has shape \(3, 4\).*\(3, 2\)"):
        op.gate_backward(torch.zeros(3, 4), x, SWIGLU)
    with pytest.raises(ValueError, match=r"scale has shape \(2,\)"):
        op.gate_backward(torch.zeros(3, 2), x, SWIGLU, torch.ones(2))
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"limit=.*above 0"):
            Gate(limit=limit)


def test_raw_operations_are_without_autograd() -> None:
    gate_up, grad, scale = inputs(3, 4, torch.float32)
    outputs = op.gate_backward(grad, gate_up.requires_grad_(), SWIGLU, scale.requires_grad_())
    for tensor in (
        *outputs,
        op.gate_forward(gate_up, SWIGLU),
        op.gate_gradient(grad, gate_up, SWIGLU),
    ):
        assert tensor is not None
        assert not tensor.requires_grad
