"""Sums of outer products over the rows of experts, against one product in fp64 for each expert; the
Triton kernel, in the interpreter, against the reference."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from in_turn import in_turn
from kernels.implementations import INTERPRETER, assert_close, multiplying_bf16, on_each
from lather.kernels.grouped_weight_gradient import outer_product_sums, reference, validate

try:
    from lather.kernels import launch
    from lather.kernels.grouped_weight_gradient import triton
except ModuleNotFoundError:
    launch = triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)
ADDED = pytest.mark.parametrize("accumulate", [False, True], ids=["first", "later"])
COUNTS = {
    "uneven": [3, 0, 70, 1, 0],
    "nobody": [0, 0, 0],
    "all in one": [0, 137, 0],
    "no expert": [],
}
ODD = [(33, 50), (130, 257), (1, 7), (64, 0)]
"""O and I: a part of a tile, several tiles in both, less than the smallest tile, nothing."""
EVEN = [(40, 56), (136, 264), (8, 16)]
"""The first three with rows of a multiple of 16 bytes, which descriptors can describe."""
OPERANDS = [
    (sizes, dtype)
    for dtype, all_sizes in (
        (torch.float32, ODD),
        (torch.bfloat16, [*ODD, *EVEN]),
        (torch.float16, EVEN),
    )
    for sizes in all_sizes
]
BOTH_LOADS = pytest.mark.parametrize("sizes", [(33, 50), (40, 56)], ids=["pointers", "described"])


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

    def run(self, implementation: ModuleType) -> Tensor:
        out = self.before.clone()
        implementation.outer_product_sums(self.grad, self.x, self.end_E, out, self.accumulate)
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
@pytest.mark.parametrize(("sizes", "dtype", "counts"), in_turn(OPERANDS, COUNTS, each=2), ids=str)
def test_each_experts_sum_is_its_own_in_fp32(
    implementation: ModuleType,
    counts: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    case = Case(COUNTS[counts], sizes, dtype, accumulate)
    assert_close(case.run(implementation), case.expected(), torch.float32)


@INTERPRETER
@ADDED
@pytest.mark.parametrize("group", [1, 2, 8])
def test_each_tile_is_computed_once_whatever_their_order(
    group: int, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tiles in both directions: the last group of two has one."""
    monkeypatch.setattr(triton, "GROUP", group)
    case = Case([70], (264, 272), torch.bfloat16, accumulate)
    assert_close(case.run(triton), case.expected(), torch.float32)


@IMPLEMENTATIONS
@ADDED
@BOTH_LOADS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_other_experts_may_hold_nan(
    implementation: ModuleType, sizes: tuple[int, int], accumulate: bool
) -> None:
    counts = [3, 64, 0, 70, 1]
    case = Case(counts, sizes, torch.bfloat16, accumulate)
    finite = case.run(implementation)
    operands, start = (case.grad, case.x), 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        case.grad, case.x = (torch.full_like(operand, torch.nan) for operand in operands)
        case.grad[rows], case.x[rows] = (operand[rows] for operand in operands)
        assert case.run(implementation)[expert].equal(finite[expert])
        start += count


@IMPLEMENTATIONS
@ADDED
@BOTH_LOADS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_reach_the_sums_that_they_belong_to_and_no_others(
    implementation: ModuleType, sizes: tuple[int, int], accumulate: bool
) -> None:
    case = Case(COUNTS["uneven"], sizes, torch.bfloat16, accumulate)
    finite = case.run(implementation)
    case.grad[10, 5], case.x[20, 9] = torch.nan, torch.inf
    found = case.run(implementation)
    assert found[2, 5].isnan().all()
    others = torch.arange(sizes[0]) != 5
    assert torch.equal(found[2, others, 9], case.grad[20, others].float() * torch.inf)
    found[2, 5], found[2, :, 9] = finite[2, 5], finite[2, :, 9]
    assert found.equal(finite)


@IMPLEMENTATIONS
@BOTH_LOADS
def test_sums_of_before_stay_as_they_are_without_rows_and_keep_nan(
    implementation: ModuleType, sizes: tuple[int, int]
) -> None:
    case = Case(COUNTS["uneven"], sizes, torch.bfloat16, accumulate=True)
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
        (ValueError, r"grad has shape \(79, 33\), x \(78, 50\)", (grad, x[1:], total)),
        (TypeError, r"total is torch.bfloat16", (grad, x, total.bfloat16())),
        (ValueError, r"shape \(4, 33, 50\).*\(5, 33, 50\)", (grad, x, total[1:])),
        (ValueError, r"contiguous", (grad, x, total.mT.contiguous().mT)),
    ]
    for error, words, (left, right, added) in calls:
        with pytest.raises(error, match=words):
            validate(left, right, case.end_E, added)


# --- what reads the rows --------------------------------------------------------------------------


def described(monkeypatch: pytest.MonkeyPatch, case: Case) -> tuple[Tensor, bool]:
    """Run the kernel of Triton; returns the sums, and whether descriptors read the rows."""
    operands: list[Any] = []

    def launched(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        operands.extend(arguments[2:4])
        launch.launch(kernel, grid, *arguments, **options)

    monkeypatch.setattr(triton, "launch", launched)
    found = case.run(triton)
    assert (operands[0] is None) == (operands[1] is None)
    return found, operands[0] is not None


@INTERPRETER
@ADDED
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((40, 56), torch.bfloat16),
        ((40, 56), torch.float16),
        ((136, 264), torch.bfloat16),
        pytest.param((136, 264), torch.float16, marks=pytest.mark.grid),
    ],
    ids=str,
)
@pytest.mark.parametrize("counts", ["uneven", "all in one"])
def test_both_loads_give_the_same_bits(
    counts: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    accumulate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs that copy no blocks read every row by pointers."""
    case = Case(COUNTS[counts], sizes, dtype, accumulate)
    by_blocks, are_described = described(monkeypatch, case)
    assert are_described
    monkeypatch.setattr(triton, "copies_blocks", lambda _: False)
    by_pointers, are_described = described(monkeypatch, case)
    assert not are_described
    assert by_blocks.equal(by_pointers)


@INTERPRETER
def test_descriptors_read_rows_in_16_bits_that_begin_at_multiples_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A matrix with one row may have any stride between rows."""

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    for sizes, dtype, expected in (
        ((40, 56), torch.bfloat16, True),
        ((40, 56), torch.float32, False),
        ((40, 50), torch.bfloat16, False),
        ((36, 56), torch.bfloat16, False),
    ):
        case = Case(COUNTS["uneven"], sizes, dtype, accumulate=False)
        assert described(monkeypatch, case)[1] == expected
    case = Case(COUNTS["uneven"], (40, 56), torch.bfloat16, accumulate=False)
    case.x = shifted(case.x)
    found, are_described = described(monkeypatch, case)
    assert not are_described
    assert_close(found, case.expected(), torch.float32)
    case = Case([1], (40, 56), torch.bfloat16, accumulate=False)
    case.grad, case.x = (
        operand[:1].as_strided((1, operand.shape[1]), (3, 1)) for operand in (case.grad, case.x)
    )
    found, are_described = described(monkeypatch, case)
    assert are_described
    assert_close(found, case.expected(), torch.float32)


@INTERPRETER
def test_gpus_from_compute_capability_9_on_copy_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(backend: str, architecture: int | str) -> bool:
        target = SimpleNamespace(backend=backend, arch=architecture)
        driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
        monkeypatch.setattr(launch, "driver", driver)
        return launch.copies_blocks(torch.zeros(1))

    assert launch.copies_blocks(torch.zeros(1))  # Triton's interpreter
    assert [answer("cuda", n) for n in (80, 89, 90, 100)] == [False, False, True, True]
    assert not answer("hip", "gfx942")
