"""Sums of outer products over the rows of experts, against one product in fp64 for each expert; the
Triton kernel, in the interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.implementations import assert_close, multiplying_bf16, on_each
from lather.kernels.grouped_weight_gradient import outer_product_sums, reference, validate

try:
    from lather.kernels.grouped_weight_gradient import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ADDED = pytest.mark.parametrize("accumulate", [False, True], ids=["first", "later"])
COUNTS = {
    "uneven": [3, 0, 70, 1, 0],
    "all in one": [0, 137, 0],
    "nobody": [0, 0, 0],
    "no expert": [],
}
SIZES = [(33, 50), (130, 257), (1, 7), (64, 0)]
"""O and I: a part of a tile, several tiles in both, less than the smallest tile, nothing."""


@pytest.fixture(autouse=True)
def _bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplying_bf16(monkeypatch)


class Case:
    """Rows of experts in numbers `counts`, and rows after them that hold NaN, because nobody may
    read them; sums of before; and the sums that are expected after."""

    def __init__(
        self, counts: list[int], sizes: tuple[int, int], dtype: torch.dtype, accumulate: bool
    ) -> None:
        generator = torch.Generator().manual_seed(sum(counts))
        self.end_E = torch.tensor(counts).cumsum(0).to(torch.int32)
        self.counts, self.accumulate = counts, accumulate
        self.grad, self.x = (
            torch.randn(sum(counts) + 5, size, generator=generator).to(dtype) for size in sizes
        )
        for operand in (self.grad, self.x):
            operand[sum(counts) :] = torch.nan
        self.before = torch.randn(len(counts), *sizes, generator=generator)
        if not accumulate:
            self.before.fill_(torch.nan)

    def run(self, implementation: ModuleType, **rows: Tensor) -> Tensor:
        out = self.before.clone()
        operands = self.grad, self.x, self.end_E
        implementation.outer_product_sums(*operands, out, self.accumulate, **rows)
        return out

    def expected(self) -> Tensor:
        out = self.before.double() if self.accumulate else torch.zeros_like(self.before).double()
        used = sum(self.counts)
        runs = (rows[:used].double().split(self.counts) for rows in (self.grad, self.x))
        for expert, (grad, x) in enumerate(zip(*runs, strict=True) if used else ()):
            out[expert] += grad.T @ x
        return out


@IMPLEMENTATIONS
@ADDED
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_each_experts_sum_is_its_own_in_fp32(
    implementation: ModuleType,
    counts: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    case = Case(COUNTS[counts], sizes, dtype, accumulate)
    assert_close(case.run(implementation), case.expected(), torch.float32)


@IMPLEMENTATIONS
@ADDED
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("gathered", ["grad", "x", "both"])
def test_rows_that_an_index_picks_have_the_bits_of_copies(
    implementation: ModuleType, gathered: str, index: torch.dtype, accumulate: bool
) -> None:
    """An index of -1 picks zeros; a source row that no index picks may hold anything."""
    case = Case(COUNTS["uneven"], (33, 50), torch.bfloat16, accumulate)
    generator = torch.Generator().manual_seed(1)
    rows: dict[str, Tensor] = {}
    sources: dict[str, Tensor] = {}
    for name in ("grad", "x") if gathered == "both" else (gathered,):
        operand: Tensor = getattr(case, name)
        source = torch.randn(40, operand.shape[1], generator=generator).bfloat16()
        source[7] = torch.nan
        picked = torch.randint(-1, 40, (len(operand),), generator=generator)
        picked[picked == 7] = 6
        operand.copy_(torch.cat([source, source.new_zeros(1, source.shape[1])])[picked])
        rows[f"{name}_rows"], sources[name] = picked.to(index), source
    expected = case.run(implementation)
    for name, source in sources.items():
        setattr(case, name, source)
    assert case.run(implementation, **rows).equal(expected)
    assert expected.isfinite().all()


@IMPLEMENTATIONS
@ADDED
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_reach_the_sums_that_they_belong_to_and_no_others(
    implementation: ModuleType, accumulate: bool
) -> None:
    case = Case(COUNTS["uneven"], (33, 50), torch.bfloat16, accumulate)
    finite = case.run(implementation)
    case.grad[10, 5], case.x[20, 9] = torch.nan, torch.inf
    found = case.run(implementation)
    assert found[2, 5].isnan().all()
    others = torch.arange(33) != 5
    assert torch.equal(found[2, others, 9], case.grad[20, others].float() * torch.inf)
    found[2, 5], found[2, :, 9] = finite[2, 5], finite[2, :, 9]
    assert found.equal(finite)


@IMPLEMENTATIONS
def test_sums_of_before_stay_as_they_are_without_rows_and_keep_nan(
    implementation: ModuleType,
) -> None:
    case = Case(COUNTS["uneven"], (33, 50), torch.bfloat16, accumulate=True)
    case.before[:, 3, 4] = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf, torch.nan])
    found = case.run(implementation)
    for expert in (1, 4):
        assert found[expert].view(torch.int32).equal(case.before[expert].view(torch.int32))
    assert found[[0, 2, 3], 3, 4].tolist()[1:] == [torch.inf, -torch.inf]
    assert found[0, 3, 4].isnan()


@IMPLEMENTATIONS
def test_many_micro_batches_lose_nothing_to_the_operands_dtype(implementation: ModuleType) -> None:
    """100 times a product of 3 x 2^-8 added to 1: in bf16 the sum would stay 1 or move by 2^-7."""
    out = torch.ones(1, 1, 1)
    grad, x = torch.tensor([[3.0]]).bfloat16(), torch.tensor([[2.0**-8]]).bfloat16()
    end_E = torch.ones(1, dtype=torch.int32)
    for _ in range(100):
        implementation.outer_product_sums(grad, x, end_E, out, True)
    assert out.item() == 1 + 300 * 2.0**-8


@ADDED
def test_the_sum_is_returned_and_autograd_knows_that_it_changed(accumulate: bool) -> None:
    case = Case(COUNTS["uneven"], (33, 50), torch.bfloat16, accumulate)
    total = case.before.clone() if accumulate else None
    found = outer_product_sums(case.grad, case.x, case.end_E, total)
    assert found.equal(case.run(reference))
    if total is not None:
        assert found is total
        assert total._version > 0


def test_errors_name_value_and_constraint() -> None:
    case = Case(COUNTS["uneven"], (33, 50), torch.bfloat16, accumulate=True)
    grad, x, total = case.grad, case.x, case.before
    calls: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, r"x torch.float32: have to be the same", (grad, x.float(), total)),
        (TypeError, r"grad is torch.float64.*torch.bfloat16", (grad.double(), x.double(), total)),
        (ValueError, r"grad has shape \(79, 33\) and 79 rows.*78", (grad, x[1:], total)),
        (TypeError, r"total is torch.bfloat16", (grad, x, total.bfloat16())),
        (ValueError, r"shape \(4, 33, 50\).*\(5, 33, 50\)", (grad, x, total[1:])),
        (ValueError, r"contiguous", (grad, x, total.mT.contiguous().mT)),
    ]
    for error, words, (left, right, added) in calls:
        with pytest.raises(error, match=words):
            validate(left, right, case.end_E, added, None, None)
    rows = torch.zeros(79, dtype=torch.int64)
    validate(grad, x[:3], case.end_E, None, None, rows)
    with pytest.raises(ValueError, match=r"79 rows of experts, x .* and 78"):
        validate(grad, x, case.end_E, None, None, rows[1:])
