"""Routing indices against plain loops over the pairs; the Triton kernels, in the interpreter,
against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from in_turn import in_turn
from kernels.implementations import INTERPRETER, on_each
from lather.kernels import route as op
from lather.kernels.route import plan_route, reference

try:
    from lather.kernels.route import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

IMPLEMENTATIONS = on_each(reference, triton)

CASES = {  # tokens, slots, experts, alignment, share of pairs without a row
    "uneven": (63, 3, 5, 1, 0.0),
    "many_experts": (50, 10, 130, 16, 0.3),
    "one_pair": (1, 1, 4, 8, 0.0),
    "no_tokens": (0, 2, 3, 4, 0.0),
    "no_tokens_unaligned": (0, 6, 3, 1, 0.0),
    "one_expert": (500, 1, 1, 7, 0.0),
    "elsewhere": (21, 2, 3, 1, 1.0),
    "holes": (63, 2, 64, 1, 0.5),
}


def experts(case: str) -> Tensor:
    tokens, slots, num_experts, _, missing = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    scores = torch.rand(tokens, num_experts, generator=generator) * torch.linspace(
        1, 2, num_experts
    )
    ids = (
        scores.topk(min(slots, num_experts), -1).indices
        if tokens
        else torch.zeros(0, slots, dtype=torch.int64)
    )
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < missing, -1)


def loops(
    experts_TK: Tensor, num_experts: int, alignment: int
) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """Apply the definition: expert after expert, token after token, slot after slot."""
    tokens, slots = experts_TK.shape
    ids = experts_TK.tolist()
    token_of_row: list[int] = []
    row_of_pair = [[-1] * slots for _ in range(tokens)]
    counts, ends = [], []
    for expert in range(num_experts):
        start = len(token_of_row)
        for t in range(tokens):
            for k in range(slots):
                if ids[t][k] == expert:
                    row_of_pair[t][k] = len(token_of_row)
                    token_of_row.append(t)
        counts.append(len(token_of_row) - start)
        token_of_row += [-1] * (-len(token_of_row) % alignment)
        ends.append(len(token_of_row))
    bound = tokens * slots if alignment == 1 else tokens * slots + num_experts * (alignment - 1)
    bound += -bound % alignment
    return token_of_row + [-1] * (bound - len(token_of_row)), row_of_pair, counts, ends


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", CASES)
def test_indices_against_plain_loops(implementation: ModuleType, case: str) -> None:
    experts_TK, (_, _, num_experts, alignment, _) = experts(case), CASES[case]
    token_of_row, row_of_pair, counts, ends = loops(experts_TK, num_experts, alignment)
    token_G, row_TK, count_E, end_E = implementation.plan_route(experts_TK, num_experts, alignment)
    assert [t.dtype for t in (token_G, row_TK, count_E, end_E)] == [torch.int64] * 3 + [torch.int32]
    assert row_TK.shape == experts_TK.shape
    indices = [x.tolist() for x in (token_G, row_TK, count_E, end_E)]
    assert indices == [token_of_row, row_of_pair, counts, ends]


@INTERPRETER
def test_more_blocks_than_one_scan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "BLOCK_N", 4)
    monkeypatch.setattr(triton, "BLOCK_P", 8)
    monkeypatch.setattr(triton, "BLOCK_E", 2)
    experts_TK = experts("uneven")
    for actual, expected in zip(
        triton.plan_route(experts_TK, 5, 4), reference.plan_route(experts_TK, 5, 4), strict=True
    ):
        assert torch.equal(actual, expected)


def test_ends_are_the_offsets_of_grouped_mm() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD, w_EDF = torch.randn(21, 8, generator=generator), torch.randn(6, 8, 4, generator=generator)
    experts_TK = torch.randint(-1, 5, (21, 2), generator=generator)  # expert 5 gets no pair
    route = plan_route(experts_TK, 6, alignment=8)
    out = F.grouped_mm(x_TD[route.token_G.clamp(min=0)], w_EDF, offs=route.end_E)
    for t in range(21):
        for k in range(2):
            if experts_TK[t, k] >= 0:
                torch.testing.assert_close(
                    out[route.row_TK[t, k]], x_TD[t] @ w_EDF[experts_TK[t, k]], rtol=1e-5, atol=1e-5
                )


@INTERPRETER
def test_input_of_any_layout() -> None:
    experts_TK = experts("holes").t().contiguous().t()
    for actual, expected in zip(
        triton.plan_route(experts_TK, 64, 2),
        reference.plan_route(experts_TK.contiguous(), 64, 2),
        strict=True,
    ):
        assert torch.equal(actual, expected)


def test_errors_name_value_and_constraint() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"int32.*int64"):
        op.validate(ids.int(), 4, 1)
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        op.validate(ids.flatten(), 4, 1)
    with pytest.raises(ValueError, match="2\\*\\*31"):
        plan_route(ids, 4, 2**30)
    for wrong in (4, -2):
        ids[1, 1] = wrong
        with pytest.raises(ValueError, match=rf"holds {wrong}: .*\[-1, 4\)"):
            plan_route(ids, 4)


@IMPLEMENTATIONS
@pytest.mark.parametrize("alignment", [1, 8])
def test_room_for_the_pairs_that_have_an_expert_here(
    implementation: ModuleType, alignment: int
) -> None:
    experts_TK = experts("holes").remainder(5).masked_fill(experts("holes") < 0, -1)
    num_pairs = int((experts_TK >= 0).sum())
    assert 0 < num_pairs < experts_TK.numel()
    token_G, row_TK, count_E, end_E = implementation.plan_route(experts_TK, 5, alignment)
    token, row, count, end = implementation.plan_route(experts_TK, 5, alignment, num_pairs)
    assert len(token) == op.reference.rows_for(experts_TK, 5, alignment, num_pairs) < len(token_G)
    assert token.untyped_storage().nbytes() == 8 * len(token)
    assert torch.equal(token, token_G[: len(token)])
    assert (token_G[len(token) :] == -1).all()
    assert torch.equal(row, row_TK)
    assert torch.equal(count, count_E)
    assert torch.equal(end, end_E)
    nobody = torch.full((3, 2), -1)
    token, row, count, _ = implementation.plan_route(nobody, 5, alignment, 0)
    assert (token == -1).all()
    assert len(token) >= 1
    assert (row == -1).all()
    assert not count.any()


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("case", "dtype"), in_turn(CASES, [torch.float32, torch.float64, torch.bfloat16]), ids=str
)
def test_values_move_between_slots_and_rows(
    implementation: ModuleType, case: str, dtype: torch.dtype
) -> None:
    _, _, num_experts, alignment, _ = CASES[case]
    route = plan_route(experts(case), num_experts, alignment)
    generator = torch.Generator().manual_seed(1)
    value_TK = torch.randn(route.row_TK.shape, generator=generator).to(dtype)
    value_TK.flatten()[:2] = torch.tensor([torch.nan, torch.inf], dtype=dtype)[: value_TK.numel()]
    num_rows = len(route.token_G)
    expected_G, expected_TK = torch.zeros(num_rows, dtype=dtype), torch.zeros_like(value_TK)
    for token, rows in enumerate(route.row_TK.tolist()):
        for slot, row in enumerate(rows):
            if row >= 0:
                expected_G[row] = expected_TK[token, slot] = value_TK[token, slot]
    value_G = implementation.rows_from_slots(value_TK, route.row_TK, num_rows)
    back_TK = implementation.slots_from_rows(value_G, route.row_TK)
    for actual, expected in ((value_G, expected_G), (back_TK, expected_TK)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@INTERPRETER
def test_values_of_slots_that_are_no_block_in_memory() -> None:
    value_KT, row_KT = torch.rand(3, 7), torch.randperm(21).view(3, 7)
    for module in (triton, reference):
        value_G = module.rows_from_slots(value_KT.t(), row_KT.t(), 21)
        assert value_G[row_KT].equal(value_KT)
        wide_G = value_G.repeat_interleave(2)[::2]
        assert module.slots_from_rows(wide_G, row_KT.t()).equal(value_KT.t())
