"""The indices of an expert exchange against plain loops over tokens, ranks and slots, to the bit;
the Triton kernels in the interpreter, too. Memory that nobody wrote to holds NaN or the largest
integer."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from in_turn import in_turn
from kernels.implementations import INTERPRETER, on_each
from lather.kernels.exchange_plan import plan_rows, reference

try:
    from lather.kernels.exchange_plan import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)

CASES = {  # tokens, slots, ranks, experts on a rank, share of padding (None: there can be none)
    "several blocks": (300, 6, 8, 8, None),
    "odd": (63, 3, 5, 3, None),
    "padding": (140, 4, 3, 4, 0.4),
    "could have padding": (21, 2, 4, 2, 0.0),
    "all padding": (9, 2, 4, 2, 1.0),
    "no tokens": (0, 2, 4, 2, None),
    "no tokens, could have padding": (0, 2, 4, 2, 0.0),
    "one token": (1, 1, 4, 1, None),
    "one rank": (130, 5, 1, 7, None),
    "all slots on one of two ranks": (17, 8, 2, 8, None),
    "16 slots": (129, 16, 2, 10, 0.1),
    "64 ranks": (70, 8, 64, 2, 0.2),
    "ranks of an odd number": (50, 4, 33, 1, None),
}


def experts(case: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Draw K different experts of each token; of the lower ranks more often, so that some get
    nothing and some tokens go to one rank."""
    t, k, p, n, padding = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    scores_TE = torch.rand(t, p * n, generator=generator) * torch.linspace(1, 0.5, p * n)
    experts_TK = scores_TE.topk(k).indices if t else torch.zeros(0, k, dtype=torch.int64)
    is_padding_T1 = torch.rand(t, 1, generator=generator) < (padding or 0)
    return experts_TK.masked_fill(is_padding_T1, -1).to(dtype)


def values(case: str, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    t, k, *_ = CASES[case]
    generator = torch.Generator().manual_seed(1)
    value_TK = torch.randn(t if rows is None else rows, k, generator=generator).to(dtype)
    value_TK.flatten()[:2] = torch.tensor([torch.nan, -0.0], dtype=dtype)[: value_TK.numel()]
    return value_TK


def loops(
    experts_TK: Tensor, num_ranks: int, num_local: int
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Apply the definition: rank after rank, token after token, slot after slot. Returns sizes,
    rows of slots, and tokens of rows."""
    ids = experts_TK.tolist()
    token_of_row: list[int] = []
    row_of_slot = [[-1] * experts_TK.shape[1] for _ in ids]
    sizes = []
    for rank in range(num_ranks):
        sent = pairs = 0
        for token, slots in enumerate(ids):
            here = [k for k, e in enumerate(slots) if e >= 0 and e // num_local == rank]
            if here:
                for k in here:
                    row_of_slot[token][k] = len(token_of_row)
                row_of_slot[token] = [
                    ~row if k in here[1:] else row for k, row in enumerate(row_of_slot[token])
                ]
                token_of_row.append(token)
            sent, pairs = sent + bool(here), pairs + len(here)
        sizes.append([sent, pairs])
    return sizes, row_of_slot, token_of_row


@IMPLEMENTATIONS
@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, [torch.int64, torch.int32]), ids=str)
def test_rows_against_plain_loops(
    implementation: ModuleType, case: str, dtype: torch.dtype
) -> None:
    experts_TK, (t, k, p, n, padding) = experts(case, dtype), CASES[case]
    sizes, row_of_slot, token_of_row = loops(experts_TK, p, n)
    sizes_2P2, row_TK, token_U = implementation.plan_rows(experts_TK, n, p, padding is not None)
    assert (sizes_2P2.dtype, row_TK.dtype, token_U.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )
    assert sizes_2P2.shape == (2, p, 2)
    assert token_U.shape == (t * min(k, p),)
    assert sizes_2P2[0].tolist() == sizes
    assert row_TK.tolist() == row_of_slot
    assert token_U[: len(token_of_row)].tolist() == token_of_row


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("case", "dtype"), in_turn(CASES, [torch.float32, torch.float64, torch.bfloat16]), ids=str
)
def test_routing_that_travels_against_plain_loops(
    implementation: ModuleType, case: str, dtype: torch.dtype
) -> None:
    """Every sent row has its rank's experts and weights, bit for bit, and loses nothing on the
    way."""
    experts_TK, weights_TK, (_, k, p, n, padding) = experts(case), values(case, dtype), CASES[case]
    sizes_2P2, row_TK, token_U = plan_rows(experts_TK, n, p, padded=padding is not None)
    token_S = token_U[: int(sizes_2P2[0, :, 0].sum())]
    packed = implementation.pack_routing(experts_TK, weights_TK, token_S, row_TK, n)
    assert packed.shape == (len(token_S), 2 * k)
    assert packed.dtype == (torch.int64 if dtype == torch.float64 else torch.int32)
    experts_SK, weights_SK = implementation.unpack_routing(packed, dtype)
    ranks = [rank for rank, (sent, _) in enumerate(sizes_2P2[0].tolist()) for _ in range(sent)]
    expected_SK = torch.full((len(token_S), k), -1)
    expected_weights_SK = torch.zeros(len(token_S), k, dtype=dtype)
    for row, (token, rank) in enumerate(zip(token_S.tolist(), ranks, strict=True)):
        for slot, expert in enumerate(experts_TK[token].tolist()):
            if expert // n == rank:
                expected_SK[row, slot] = expert - rank * n
                expected_weights_SK[row, slot] = weights_TK[token, slot]
    assert_same(experts_SK, expected_SK)
    assert_same(weights_SK, expected_weights_SK)
    assert experts_SK.is_contiguous()
    assert weights_SK.is_contiguous()
    assert {x.untyped_storage().data_ptr() for x in (experts_SK, weights_SK)}.isdisjoint(
        {packed.untyped_storage().data_ptr()} if len(packed) else ()
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("case", "dtype"), in_turn(CASES, [torch.float32, torch.float64, torch.bfloat16]), ids=str
)
def test_gradients_of_weights_come_from_the_row_of_their_slot(
    implementation: ModuleType, case: str, dtype: torch.dtype
) -> None:
    experts_TK, (_, _, p, n, padding) = experts(case), CASES[case]
    sizes_2P2, row_TK, _ = plan_rows(experts_TK, n, p, padded=padding is not None)
    value_SK = values(case, dtype, int(sizes_2P2[0, :, 0].sum()))
    value_TK = implementation.slots_from_sent(value_SK, row_TK)
    assert_same(value_TK, reference.slots_from_sent(value_SK, row_TK))
    expected_TK = torch.zeros_like(value_TK)
    for token, rows in enumerate(row_TK.tolist()):
        for slot, row in enumerate(rows):
            if experts_TK[token, slot] >= 0:
                expected_TK[token, slot] = value_SK[row if row >= 0 else ~row, slot]
    has_expert = experts_TK >= 0
    assert_same(value_TK[has_expert], expected_TK[has_expert])


@INTERPRETER
def test_more_counts_and_ranks_than_a_tile_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "BLOCK_T", 4)
    monkeypatch.setattr(triton, "BLOCK_P", 2)
    monkeypatch.setattr(triton, "BLOCK_B", 8)
    for case in ("odd", "padding"):
        experts_TK, (_, _, p, n, padding) = experts(case), CASES[case]
        sizes, row_of_slot, token_of_row = loops(experts_TK, p, n)
        sizes_2P2, row_TK, token_U = triton.plan_rows(experts_TK, n, p, padding is not None)
        assert sizes_2P2[0].tolist() == sizes
        assert row_TK.tolist() == row_of_slot
        assert token_U[: len(token_of_row)].tolist() == token_of_row


@IMPLEMENTATIONS
def test_input_of_any_layout(implementation: ModuleType) -> None:
    experts_TK, weights_TK = experts("odd"), values("odd", torch.float32)
    turned_TK, turned_weights_TK = (x.T.contiguous().T for x in (experts_TK, weights_TK))
    sizes_2P2, row_TK, token_U = implementation.plan_rows(turned_TK, 3, 5, False)
    _, expected_TK, expected_U = reference.plan_rows(experts_TK, 3, 5, False)
    s = int(sizes_2P2[0, :, 0].sum())
    assert_same(row_TK, expected_TK)
    assert_same(token_U[:s], expected_U[:s])
    assert_same(
        implementation.pack_routing(turned_TK, turned_weights_TK, token_U[:s], row_TK, 3),
        reference.pack_routing(experts_TK, weights_TK, expected_U[:s], expected_TK, 3),
    )


@pytest.mark.parametrize(("wrong", "padded"), [(8, False), (8, True), (-1, False), (-2, True)])
def test_experts_out_of_range_are_refused(wrong: int, padded: bool) -> None:
    experts_TK = torch.zeros(5, 2, dtype=torch.int64)
    experts_TK[3, 1] = wrong
    with pytest.raises(ValueError, match=rf"experts_TK holds {wrong}: .*{-1 if padded else 0}, 8"):
        plan_rows(experts_TK, 2, 4, padded=padded)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Check shape, dtype and bits, but for those of NaN."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if actual.is_floating_point():
        is_number = ~expected.isnan()
        assert torch.equal(actual.signbit() & is_number, expected.signbit() & is_number)
