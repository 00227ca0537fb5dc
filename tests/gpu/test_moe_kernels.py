"""The MoE kernels on a CUDA device: the numbers of the references on the CPU, no waiting for the
device, and the bandwidth reached."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.kernels import combine, exchange_plan, gather, route, swiglu
from lather.kernels.backend import use_triton
from lather.kernels.grouped_weight_gradient import outer_product_sums, reference
from lather.kernels.residual_sum import residual_sum
from lather.kernels.rms_norm import add_rms_norm, rms_norm
from lather.kernels.rotary import rotate_halves, rotate_pairs
from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU, Gate
from lather.models.layers import weight_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GATES = [
    pytest.param(SWIGLU, id="swiglu"),
    pytest.param(CLAMPED_SWIGLU, id="clamped"),
    pytest.param(Gate(1.3, 0.5, 0.7), id="halves_clamped"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-3}
# of bf16 a tenth of the sums lie between two numbers, which a CPU may round up and a GPU to even
ROUTES = [
    (63, 3, 5, 1),
    (500, 8, 256, 16),
    (1, 1, 4, 8),
    (0, 2, 3, 4),
    (500, 1, 1, 7),
    (20000, 8, 128, 128),
    (20000, 6, 64, 1),
]
GATHERS = [
    (63, 33, 500),
    (5, 2100, 3),
    (500, 1, 63),
    (1, 4, 9),
    (4, 3, 0),
    (0, 3, 2),
    (300, 2048, 2000),
]
COMBINES = [
    (63, 3, 33, 200),
    (500, 2, 4, 1000),
    (2, 6, 1100, 12),
    (1, 1, 1, 1),
    (0, 2, 3, 4),
    (3, 2, 3, 0),
    (300, 6, 2048, 2048),
]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill uninitialized memory with NaN (integer tensors with the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    assert actual.shape == expected.shape
    error = (actual.double().cpu() - expected.double().cpu()).norm()
    return bool(error <= tolerance * expected.double().norm().cpu())


def assert_same(on_cuda: Any, on_cpu: Any, dtype: torch.dtype) -> None:
    assert use_triton(*[tensor for tensor in on_cuda if tensor is not None])
    for actual, expected in zip(on_cuda, on_cpu, strict=True):
        assert (actual is None) == (expected is None)
        if actual is None:
            continue
        assert actual.dtype == expected.dtype
        if not actual.is_floating_point():
            assert torch.equal(actual.cpu(), expected)
            continue
        assert is_close(actual, expected, TOLERANCE[dtype])
        if expected.abs().sum() > 0:
            assert not is_close(actual, 1.01 * expected.double(), TOLERANCE[dtype])


def to_cuda(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def random_experts(tokens: int, slots: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + num_experts)
    ids = (
        torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :slots]
        if tokens
        else torch.zeros(0, slots, dtype=torch.int64)
    )
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1)


@DTYPES
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(63, 33), (3, 1500), (500, 4), (1, 1), (0, 4), (1000, 1408)]
)
def test_gated_activations(gate: Gate, rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    gate_up = (4 * torch.randn(rows, 2 * columns, generator=generator)).to(dtype)
    grad, scale = (
        torch.randn(rows, columns, generator=generator).to(dtype),
        torch.rand(rows, generator=generator),
    )
    there = to_cuda(grad, gate_up, scale)
    assert_same([swiglu.gate_forward(there[1], gate)], [swiglu.gate_forward(gate_up, gate)], dtype)
    assert_same(
        [swiglu.gate_gradient(*there[:2], gate)], [swiglu.gate_gradient(grad, gate_up, gate)], dtype
    )
    assert_same(
        swiglu.gate_backward(*there[:2], gate), swiglu.gate_backward(grad, gate_up, gate), dtype
    )
    scaled = swiglu.gate_backward(*there[:2], gate, there[2])
    assert_same(scaled, swiglu.gate_backward(grad, gate_up, gate, scale), dtype)


@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_routes(case: tuple[int, int, int, int]) -> None:
    tokens, slots, num_experts, alignment = case
    ids = random_experts(tokens, slots, num_experts)
    there, here = (
        route.plan_route(ids.cuda(), num_experts, alignment),
        route.plan_route(ids, num_experts, alignment),
    )
    assert_same(vars(there).values(), vars(here).values(), torch.float32)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "slots", "ranks", "local"),
    [(63, 3, 5, 3), (0, 2, 4, 2), (1, 1, 1, 1), (8192, 6, 8, 8), (5000, 8, 64, 2), (129, 16, 2, 9)],
)
def test_exchange_plans(
    tokens: int, slots: int, ranks: int, local: int, dtype: torch.dtype
) -> None:
    """Indices and routing that travels have the same bits; every tenth token is padding."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, ranks * local, generator=generator).argsort(-1)[:, :slots]
    ids = ids.masked_fill(torch.rand(tokens, 1, generator=generator) < 0.1, -1)
    weights = torch.randn(tokens, slots, generator=generator).to(dtype)
    results = []
    for experts_TK, weights_TK in (to_cuda(ids, weights), (ids, weights)):
        sizes, row_TK, token_U = exchange_plan.plan_rows(experts_TK, local, ranks, padded=True)
        token_S = token_U[: int(sizes[0, :, 0].sum())]
        packed = exchange_plan.pack_routing(experts_TK, weights_TK, token_S, row_TK, local)
        experts_SK, weights_SK = exchange_plan.unpack_routing(packed, dtype)
        grad_TK = exchange_plan.slots_from_sent(weights_SK, row_TK)
        results.append([sizes[0], row_TK, token_S, packed, experts_SK, weights_SK, grad_TK])
    assert use_triton(*results[0])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected)


@DTYPES
@pytest.mark.parametrize("shape", GATHERS, ids=str)
def test_gathers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, picked = shape
    generator = torch.Generator().manual_seed(rows)
    x, grad = (
        torch.randn(rows, columns, generator=generator).to(dtype),
        torch.randn(picked, columns, generator=generator).to(dtype),
    )
    index = (
        torch.randint(-1, rows, (picked,), generator=generator)
        if rows
        else torch.full((picked,), -1)
    )
    assert_same(
        [gather.padded_index_gather(*to_cuda(x, index))],
        [gather.padded_index_gather(x, index)],
        dtype,
    )
    assert_same(
        [gather.add_rows(*to_cuda(grad, index), rows)], [gather.add_rows(grad, index, rows)], dtype
    )


@DTYPES
@pytest.mark.parametrize("shape", COMBINES, ids=str)
def test_combines(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, slots, columns, rows = shape
    generator = torch.Generator().manual_seed(tokens)
    row = torch.full((tokens * slots,), -1)
    row[: min(rows, tokens * slots)] = torch.randperm(rows, generator=generator)[: tokens * slots]
    row = row.masked_fill(torch.rand(row.shape, generator=generator) < 0.1, -1).view(tokens, slots)
    values = torch.full((rows, columns), float("nan"))
    values[row[row >= 0]] = torch.randn(int((row >= 0).sum()), columns, generator=generator)
    values = values.to(dtype)
    weights = torch.rand(tokens, slots, generator=generator)
    there = to_cuda(values, row, weights)
    assert_same(
        [combine.combine_forward(*there)],
        [combine.combine_forward(values, row, weights)],
        dtype,
    )
    assert_same(
        [combine.combine_forward(*there[:2])], [combine.combine_forward(values, row)], dtype
    )


def public_operations(x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Run the operations of a layer of experts that multiply by one, and the gradient of those that
    autograd knows."""
    x = x.detach().requires_grad_()
    plan = route.plan_route(ids, 8, 16)
    rows = gather.padded_index_gather(x, plan.token_G)
    h = swiglu.swiglu(rows)
    out = combine.combine_forward(h.detach(), plan.row_TK, weights)
    loss = h.square().sum() + swiglu.swiglu(rows, CLAMPED_SWIGLU).square().sum()
    return [out, *torch.autograd.grad(loss, (x,))]


def test_public_operations_agree_with_the_cpu_and_do_not_wait() -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = (
        torch.randn(63, 64, generator=generator),
        random_experts(63, 3, 8),
        torch.rand(63, 3, generator=generator),
    )
    there = to_cuda(*arguments)
    public_operations(*there)  # this compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = public_operations(*there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, public_operations(*arguments), torch.float32)


BAD_CALLS = {
    "expert_id": "route.plan_route(torch.tensor([[0], [4]]).cuda(), 4)",
    "expert_of_exchange": "exchange_plan.plan_rows(torch.tensor([[0], [4]]).cuda(), 2, 2, "
    "padded=False)",
    "index": "gather.padded_index_gather(torch.ones(4, 2).cuda(), torch.tensor([4]).cuda())",
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_wrong_indices_are_asserted_on_the_device(name: str) -> None:
    """A process of its own makes the mistake, because a device assertion ends the use of the
    device."""
    code = (
        "import torch\nfrom lather.kernels import exchange_plan, gather, route\n"
        f"{BAD_CALLS[name]}\ntorch.cuda.synchronize()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode != 0
    assert "assert" in result.stderr.lower()
    assert "out of range" in result.stderr + result.stdout


def milliseconds(function: Callable[[], Any]) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[10]


def test_bandwidth_is_reported(record_property: Callable[[str, object], None]) -> None:
    """The sizes are DeepSeek-V2-Lite's layer at 8192 tokens in bf16: GB/s of the bytes that have to
    be read and written, and of a device copy of as many."""
    torch.use_deterministic_algorithms(False)  # otherwise the poisoning would be timed, too
    t, d, f, k, e = 8192, 2048, 1408, 6, 64
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    ids = torch.rand(t, e, generator=generator, device="cuda").topk(k).indices
    plan, x, rows = route.plan_route(ids, e), randn(t, d), randn(t * k, d)
    weights, gate_up, grad_h = (
        torch.rand(t, k, generator=generator, device="cuda"),
        randn(t * k, 2 * f),
        randn(t * k, f),
    )
    scale = weights.flatten()
    g = 2 * t * k  # the bytes of one column of all rows
    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "swiglu forward": (lambda: swiglu.gate_forward(gate_up, SWIGLU), g * 3 * f),
        "swiglu gradient": (lambda: swiglu.gate_gradient(grad_h, gate_up, SWIGLU), g * 5 * f),
        "swiglu backward, scaled": (
            lambda: swiglu.gate_backward(grad_h, gate_up, SWIGLU, scale),
            g * 6 * f,
        ),
        "clamped swiglu forward": (lambda: swiglu.gate_forward(gate_up, CLAMPED_SWIGLU), g * 3 * f),
        "clamped swiglu backward, scaled": (
            lambda: swiglu.gate_backward(grad_h, gate_up, CLAMPED_SWIGLU, scale),
            g * 6 * f,
        ),
        "gather": (
            lambda: gather.padded_index_gather(x, plan.token_G, 1, checked=False),
            2 * t * d + g * d,
        ),
        "gather adjoint, any index": (
            lambda: gather.add_rows(rows, plan.token_G, t),
            2 * t * d + g * d,
        ),
        "gather adjoint, known rows": (
            lambda: combine.combine_forward(rows, plan.row_TK),
            2 * t * d + g * d,
        ),
        "combine forward": (
            lambda: combine.combine_forward(rows, plan.row_TK, weights),
            2 * t * d + g * d,
        ),
        "route": (lambda: route.plan_route(ids, e), 3 * 8 * t * k),
    }
    for name, (function, num_bytes) in cases.items():
        source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        time, copy = milliseconds(function), milliseconds(lambda s=source, t=target: t.copy_(s))
        line = (
            f"{name}: {time:.3f} ms, {num_bytes / time / 1e6:.0f} GB/s; "
            f"device copy {num_bytes / copy / 1e6:.0f} GB/s"
        )
        record_property(name, line)
        print(line)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_an_fp32_weight_is_not_rounded_to_the_operands_dtype(
    dtype: torch.dtype,
) -> None:
    grad, x = (
        torch.randn(500, width, generator=torch.Generator().manual_seed(width)).to("cuda", dtype)
        for width in (64, 48)
    )
    # part of the columns of wider rows, as in gate/up
    found = weight_product(grad[:, :32], x, torch.float32)
    assert found.dtype == torch.float32
    assert is_close(found, grad[:, :32].double().T @ x.double(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(33, 50), (130, 257), (7, 1408), (8, 16), (40, 56), (264, 136), (2816, 2048)],
    ids=str,
)
def test_sums_of_outer_products(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of the last sizes in 16 bits are read by descriptors, the others by pointers. Rows after
    the last end hold NaN, and so do those of all other experts in the last calls; the second call
    has the same bits as the first, and a third one adds to its sums."""
    generator = torch.Generator().manual_seed(0)
    counts = [3, 0, 700, 64, 8, 0]
    grad, x = (torch.randn(800, size, generator=generator).to(dtype) for size in sizes)
    grad[sum(counts) :], x[sum(counts) :] = torch.nan, torch.nan
    end_E = torch.tensor(counts).cumsum(0).int()
    exact = torch.zeros(len(counts), *sizes, dtype=torch.float64)
    reference.outer_product_sums(grad, x, end_E, exact, False)
    grad, x, end_E = to_cuda(grad, x, end_E)
    first = outer_product_sums(grad, x, end_E)
    assert first.equal(outer_product_sums(grad, x, end_E))
    assert is_close(first, exact, 1e-5)
    assert not is_close(first, 1.01 * exact, 1e-5)
    total = first.clone()
    assert outer_product_sums(grad, x, end_E, total) is total
    assert is_close(total, 2 * exact, 1e-5)
    start = 0
    for expert, count in enumerate(counts):
        alone = [torch.full_like(operand, torch.nan) for operand in (grad, x)]
        for copy, operand in zip(alone, (grad, x), strict=True):
            copy[start : start + count] = operand[start : start + count]
        assert outer_product_sums(*alone, end_E)[expert].equal(first[expert])
        start += count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pointers_and_descriptors_give_the_same_sums_of_outer_products(dtype: torch.dtype) -> None:
    """A matrix that begins 2 bytes later has no descriptor."""
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(800, size, generator=generator).to("cuda", dtype) for size in (264, 136))
    later = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    end_E = torch.tensor([3, 3, 703, 767, 800], dtype=torch.int32, device="cuda")
    by_pointers = outer_product_sums(grad, later, end_E)
    assert is_close(by_pointers, outer_product_sums(grad, x, end_E), 1e-5)


@DTYPES
@pytest.mark.parametrize("shape", [(63, 33), (5, 2048), (1000, 128), (3, 4100), (0, 8)], ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(shape[1], generator=generator).to(torch.promote_types(dtype, torch.float32))
    results = []
    for device in ("cuda", "cpu"):
        leaves = [one.to(device).requires_grad_() for one in (x, weight)]
        y = rms_norm(*leaves, 1e-6)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, grad.to(device, y.dtype))))
    assert_same(*results, dtype)


@pytest.mark.parametrize("shape", [(63, 33), (5, 2048), (1000, 128), (3, 4100)], ids=str)
def test_a_norm_with_rounded_rows_and_the_sum_behind_it(shape: tuple[int, int]) -> None:
    """The stream in fp32, its branches in bf16: a sum, two copies of rounded rows, rows in fp32."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.bfloat16
    x, branch, other, *grads = (torch.randn(shape, generator=generator) for _ in range(8))
    weight = torch.rand(shape[1], generator=generator)
    results = []
    for device in ("cuda", "cpu"):
        inputs = (x, branch.to(narrow), weight, other.to(narrow))
        leaves = [one.to(device).requires_grad_() for one in inputs]
        made = add_rms_norm(*leaves[:3], 1e-6, narrow, copies=2, wide=True)
        outputs = (*made, residual_sum(made[0], leaves[1], leaves[3]))
        to_outputs = [grad.to(y) for grad, y in zip(grads, outputs, strict=True)]
        of_leaves = torch.autograd.grad(outputs, leaves, to_outputs)
        results.append((*(y.detach() for y in outputs), *of_leaves))
    for on_device, expected in zip(*results, strict=True):
        assert on_device.dtype == expected.dtype
        assert_same((on_device,), (expected,), expected.dtype)


@DTYPES
@pytest.mark.parametrize(("tokens", "chosen", "rows"), [(63, 3, 200), (1, 1, 1), (500, 8, 4000)])
def test_values_of_slots_and_rows(tokens: int, chosen: int, rows: int, dtype: torch.dtype) -> None:
    """A third of the slots have no row."""
    generator = torch.Generator().manual_seed(0)
    value_TK = torch.randn(tokens, chosen, generator=generator).to(dtype)
    row_TK = torch.randperm(rows, generator=generator)[: tokens * chosen].view(tokens, chosen)
    row_TK[torch.rand(tokens, chosen, generator=generator) < 1 / 3] = -1
    expected_G = route.reference.rows_from_slots(value_TK, row_TK, rows)
    kernels = importlib.import_module("lather.kernels.route.triton")
    value_G = kernels.rows_from_slots(value_TK.cuda(), row_TK.cuda(), rows)
    assert value_G.cpu().equal(expected_G)
    back_TK = kernels.slots_from_rows(value_G, row_TK.cuda())
    assert back_TK.cpu().equal(route.reference.slots_from_rows(expected_G, row_TK))


@DTYPES
@pytest.mark.parametrize("turn", [rotate_pairs, rotate_halves])
def test_rotary(turn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """A part of each head is turned, and turned back."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (
        torch.randn(2, 63, 3, 20, generator=generator).to(dtype),
        torch.randn(2, 63, 3, 12, generator=generator).to(dtype),
    )
    angles = 6 * torch.rand(
        1, 63, 6, generator=generator, dtype=torch.promote_types(dtype, torch.float32)
    )
    cos, sin = angles.cos(), angles.sin()
    results = []
    for device in ("cuda", "cpu"):
        leaf = x.to(device).requires_grad_()
        y = turn(leaf[..., 8:], cos.to(device), sin.to(device))
        results.append((y.detach(), *torch.autograd.grad(y, leaf, grad.to(device))))
    assert_same(*results, dtype)
