"""Products of rows grouped by expert, with `F.grouped_mm` and with the loop, against one product
for each expert."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lather.models import grouped_products as grouped
from lather.models.grouped_products import (
    expert_of_row,
    grouped_linear,
    grouped_linear_transposed,
    grouped_sum,
    grouped_weight_gradient,
)
from models.tiny import error, random_normal

COUNTS = {
    "uneven": [3, 0, 7, 1, 0],
    "all in one": [0, 11, 0, 0, 0],
    "nobody": [0, 0, 0, 0, 0],
    "last rows free": [2, 2, 0, 1, 3],
}
SIZES = {
    "grouped_mm": (torch.float32, 16, 8),
    "loop, odd sizes": (torch.float32, 15, 7),
    "loop, fp64": (torch.float64, 16, 8),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


class Case:
    """Rows of experts in numbers `counts`, and free rows after them up to 14, which hold NaN,
    because nobody may read them."""

    def __init__(self, counts: list[int], dtype: torch.dtype, i: int, o: int) -> None:
        self.end_E = torch.tensor(counts).cumsum(0).to(torch.int32)
        self.rows = [
            slice(end - count, end) for end, count in zip(self.end_E.tolist(), counts, strict=True)
        ]
        self.used = sum(counts)
        self.x_GI, self.g_GO = (self._rows(width, dtype, seed) for width, seed in ((i, 0), (o, 1)))
        self.weight_EOI = random_normal(len(counts), o, i, seed=2).to(dtype)

    def _rows(self, width: int, dtype: torch.dtype, seed: int) -> Tensor:
        rows = random_normal(14, width, seed=seed).to(dtype)
        rows[self.used :] = torch.nan
        return rows


@pytest.fixture(params=[(c, s) for c in COUNTS for s in SIZES], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(COUNTS[request.param[0]], *SIZES[request.param[1]])


def test_every_operation_is_each_experts_own_and_zero_without_rows(case: Case) -> None:
    x, g, weight, end = case.x_GI, case.g_GO, case.weight_EOI, case.end_E
    runs = list(zip(case.rows, weight, strict=True))
    linear, transposed = grouped_linear(x, weight, end), grouped_linear_transposed(g, weight, end)
    assert (linear.shape, transposed.shape) == (g.shape, x.shape)
    for actual, expected in (
        (linear[: case.used], torch.cat([x[rows] @ w.T for rows, w in runs])),
        (transposed[: case.used], torch.cat([g[rows] @ w for rows, w in runs])),
        (grouped_weight_gradient(g, x, end), torch.stack([g[r].T @ x[r] for r in case.rows])),
        (grouped_sum(x, end), torch.stack([x[rows].sum(0) for rows in case.rows])),
    ):
        assert error(actual, expected) < TOLERANCE[actual.dtype]


def on_a_gpu_with(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(get_device_capability=lambda device: capability)
    monkeypatch.setattr(grouped, "is_gpu", lambda x: True)
    monkeypatch.setattr(grouped, "gpu_module", lambda x: gpu)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["sm_90", "sm_100"])
def test_what_a_kernel_leaves_for_experts_without_rows_is_overwritten(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu_with(capability, monkeypatch)
    left = torch.ones(4, 3, 2)
    left[[0, 2]] = torch.nan
    zeroed = grouped._zeros_for_idle(left.clone(), torch.tensor([0, 5, 5, 9], dtype=torch.int32))
    expected = left.nan_to_num(0.0) if capability >= (10, 0) else left
    torch.testing.assert_close(zeroed, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("capability", "sound"),
    [((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
    ids=str,
)
def test_grouped_mm_is_for_gpus_that_have_its_kernel(
    capability: tuple[int, int], sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other GPUs a loop over experts runs, and the host waits for the ends of their rows."""
    on_a_gpu_with(capability, monkeypatch)
    assert grouped._sound(torch.ones(8, 16, dtype=torch.bfloat16)) == sound
    assert not grouped._sound(torch.ones(8, 16))


def test_tolerance_rejects_one_percent() -> None:
    case = Case(COUNTS["uneven"], *SIZES["grouped_mm"])
    expected = grouped_linear(case.x_GI, case.weight_EOI, case.end_E)[: case.used]
    case.weight_EOI[2] *= 1.01
    assert (
        error(grouped_linear(case.x_GI, case.weight_EOI, case.end_E)[: case.used], expected)
        > 100 * TOLERANCE[torch.float32]
    )


def test_expert_of_row() -> None:
    end_E = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expert_of_row(end_E, 7).tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_bf16_products_are_rounded_once() -> None:
    case = Case(COUNTS["uneven"], torch.bfloat16, 16, 8)
    wide = grouped_linear(case.x_GI.float(), case.weight_EOI.float(), case.end_E)[: case.used]
    assert (
        error(grouped_linear(case.x_GI, case.weight_EOI, case.end_E)[: case.used].float(), wide)
        < 2**-8
    )


# --- weight gradients in fp32 ---------------------------------------------------------------------


@pytest.mark.parametrize("counts", ["uneven", "nobody"])
@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_a_gradient_in_fp32_is_not_rounded_and_is_added_in_place(
    operands: torch.dtype, counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that `F.grouped_mm` does not take are no exception. x is rounded to the dtype of g."""
    monkeypatch.setattr(grouped, "use_triton", lambda *tensors: True)
    case = Case(COUNTS[counts], operands, 15, 7)
    wide = Case(COUNTS[counts], torch.float32, 15, 7)
    exact = torch.stack([case.g_GO[r].double().T @ case.x_GI[r].double() for r in case.rows])
    arguments = case.g_GO, wide.x_GI, case.end_E
    first = grouped_weight_gradient(*arguments, dtype=torch.float32)
    assert first.dtype == torch.float32
    assert error(first, exact) < 1e-6
    total = first.clone()
    assert grouped_weight_gradient(*arguments, dtype=torch.float32, total=total) is total
    assert error(total, 2 * exact) < 1e-6
    for dtype in (None, operands):
        rounded = grouped_weight_gradient(*arguments, dtype=dtype, total=total)
        assert rounded is not total
        assert rounded.dtype == operands
    assert error(total, 2 * exact) < 1e-6


def test_on_a_gpu_the_rows_of_a_gradient_in_fp32_are_gathered_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """-1 is a row of zeros."""
    monkeypatch.setattr(grouped, "use_triton", lambda *tensors: True)
    case = Case(COUNTS["uneven"], torch.bfloat16, 16, 8)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-1, 14, (len(case.x_GI),), generator=generator)
    rows[rows >= case.used] = 2
    compute = partial(grouped_weight_gradient, end_E=case.end_E, dtype=torch.float32)
    gathered = grouped.rows_of(case.x_GI, rows)
    found = compute(case.g_GO, case.x_GI, x_rows=rows)
    assert found.equal(compute(case.g_GO, gathered))
    gathered = grouped.rows_of(case.g_GO, rows)
    found = compute(case.g_GO, case.x_GI, g_rows=rows)
    assert found.equal(compute(gathered, case.x_GI))
    assert found.dtype == torch.float32


def test_on_a_cpu_a_gradient_has_the_bits_of_gathered_rows_and_no_sum_is_touched() -> None:
    case = Case(COUNTS["uneven"], torch.bfloat16, 16, 8)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-1, 14, (len(case.x_GI),), generator=generator)
    rows[rows >= case.used] = 2
    gathered = grouped.rows_of(case.x_GI, rows)
    expected = grouped_weight_gradient(case.g_GO, gathered, case.end_E)
    total = torch.full_like(expected, torch.nan, dtype=torch.float32)
    found = grouped_weight_gradient(
        case.g_GO, case.x_GI, case.end_E, x_rows=rows, dtype=torch.float32, total=total
    )
    assert found.equal(expected)
    assert total.isnan().all()
    gathered = grouped.rows_of(case.g_GO, rows)
    expected = grouped_weight_gradient(gathered, case.x_GI, case.end_E)
    assert grouped_weight_gradient(case.g_GO, case.x_GI, case.end_E, g_rows=rows).equal(expected)
