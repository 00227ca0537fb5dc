"""Outputs merged by log-sum-exps, and sums of the gradients of keys: the kernels, in the
interpreter, against the references, and these against a softmax over all keys."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, TOLERANCE, assert_close, is_close, on_each
from lather.kernels.attention_slices import KeyGradients, reference

try:
    from lather.kernels.attention_slices import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

INF, NAN = torch.inf, torch.nan
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def to_merge(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Draw two outputs (B, L, H, U) and log-sum-exps (B, H, L): the late halves of longer ones."""
    wide = torch.promote_types(dtype, torch.float32)
    batch, length, heads, width = shape
    of_two = batch, 2, length, heads, width
    tensors = [
        draw(*of_two, dtype=dtype)[:, 1],
        4 * draw(batch, 2, heads, length, seed=1, dtype=wide)[:, 1],
        draw(batch, heads, length, width, seed=2, dtype=dtype).transpose(1, 2),
        4 * draw(batch, heads, length, seed=3, dtype=wide),
    ]
    return tensors


def merged(implementation: ModuleType, tensors: list[Tensor]) -> list[Tensor]:
    """Return what the implementation makes of copies with the same strides."""
    bases = [x._base if x._base is not None else x for x in tensors]
    copies = [
        base.clone().as_strided(x.shape, x.stride(), x.storage_offset())
        for base, x in zip(bases, tensors, strict=True)
    ]
    implementation.merge_into(*copies)
    for copy, x in zip(copies[2:], tensors[2:], strict=True):
        torch.testing.assert_close(copy, x, rtol=0, atol=0, equal_nan=True)
    return copies[:2]


@INTERPRETER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 63, 3, 20), (1, 5, 16, 128), (1, 1, 1, 1)], ids=str)
def test_merging_against_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = to_merge(shape, dtype)
    (y, lse), (expected, of_all) = (merged(each, tensors) for each in (triton, reference))
    assert_close(y, expected, dtype)
    assert_close(lse, of_all, lse.dtype)


@on_each(reference, triton)
def test_merged_outputs_are_a_softmax_over_all_keys(implementation: ModuleType) -> None:
    logits_QK, values_KU = 3 * draw(7, 11, dtype=torch.float64), draw(11, 5, dtype=torch.float64)
    some, others = slice(0, 4), slice(4, 11)
    tensors = []
    for keys in (some, others):
        y_QU = logits_QK[:, keys].softmax(-1) @ values_KU[keys]
        tensors += [y_QU.view(1, 7, 1, 5), logits_QK[:, keys].logsumexp(-1).view(1, 1, 7)]
    y, lse = merged(implementation, tensors)
    assert_close(y.view(7, 5), logits_QK.softmax(-1) @ values_KU, torch.float64)
    assert_close(lse.view(7), logits_QK.logsumexp(-1), torch.float64)


@on_each(reference, triton)
def test_rows_without_keys_nan_and_infinity(implementation: ModuleType) -> None:
    """Without keys an output is 0, or the other's; what is no number stays in its row."""
    y, lse, other, of_other = to_merge((1, 8, 1, 5), torch.float32)
    lse[0, 0, :3] = torch.tensor([-INF, -INF, 100.0])
    of_other[0, 0, :3] = torch.tensor([-INF, 2.0, -INF])
    lse[0, 0, 3], of_other[0, 0, 4], lse[0, 0, 5] = NAN, INF, INF
    other[0, 6, 0, 2], y[0, 7, 0, 4] = INF, NAN
    out, total = merged(implementation, [y, lse, other, of_other])
    assert out[0, 0].tolist() == [[0.0] * 5]
    assert out[0, 1].equal(other[0, 1])
    assert out[0, 2].equal(y[0, 2])
    assert total[0, 0, :3].tolist() == [-INF, 2.0, 100.0]
    assert total[0, 0, 3].isnan()
    assert total[0, 0, 4:6].tolist() == [INF, INF]
    assert out[0, 3:6].isnan().any(-1).all()
    assert (~out[0, 6:].isfinite()).nonzero().tolist() == [[0, 0, 2], [1, 0, 4]]


def gradients(
    starts: tuple[int, int], keys: slice, widths: tuple[int, int], dtype: torch.dtype, batch: int
) -> list[KeyGradients]:
    half, (early, late) = 6, starts

    def drawn(length: int, width: int, seed: int) -> Tensor:
        return draw(batch, length, width, seed=seed, dtype=dtype)

    return [
        KeyGradients(
            drawn(2 * half, width, 1),
            drawn(min(keys.stop, late) - keys.start, width, 2),
            drawn(min(keys.stop, early) - keys.start, width, 3) if keys.start < early else None,
        )
        for width in widths
    ]


CASES = [((0, 42), slice(0, 48)), ((18, 24), slice(0, 48)), ((12, 30), slice(0, 10))]
CASES += [((12, 30), slice(10, 48)), ((12, 30), slice(20, 48))]


def check_gradients(
    starts: tuple[int, int], keys: slice, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    parts = gradients(starts, keys, widths, dtype, batch=2)
    results = []
    for implementation in (triton, reference):
        totals = [torch.full((2, 48, width), 7.0, dtype=dtype) for width in widths]
        implementation.write_key_gradients(totals, parts, starts, keys)
        results.append(totals)
    for actual, expected in zip(*results, strict=True):
        assert_close(actual[:, keys], expected[:, keys], dtype)
        outside = torch.ones(48, dtype=torch.bool)
        outside[keys] = False
        assert actual[:, outside].eq(7).all()


@INTERPRETER
@pytest.mark.parametrize(("starts", "keys"), CASES, ids=str)
def test_sums_of_gradients_against_the_reference(starts: tuple[int, int], keys: slice) -> None:
    check_gradients(starts, keys, (6, 10), torch.bfloat16)


@INTERPRETER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_gradients_wider_than_a_tile(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "TILE", 32)
    check_gradients((12, 30), slice(26, 42), (3, 33), dtype)


@on_each(reference, triton)
def test_every_key_gets_its_parts(implementation: ModuleType) -> None:
    """There are 48 keys, 12 to 17 in the early slice and 30 to 35 in the late one."""
    starts, keys = (12, 30), slice(0, 48)
    parts = [
        KeyGradients(*(torch.full((1, length, 2), value) for length, value in sizes))
        for sizes in [((12, 1.0), (30, 10.0), (12, 100.0)), ((12, 2.0), (30, 20.0), (12, 200.0))]
    ]
    totals = [torch.full((1, 48, 2), NAN) for _ in range(2)]
    implementation.write_key_gradients(totals, parts, starts, keys)
    expected = [110.0] * 12 + [11.0] * 6 + [10.0] * 12 + [1.0] * 6 + [0.0] * 12
    for factor, total in enumerate(totals, start=1):
        assert total.tolist() == [[[factor * value] * 2 for value in expected]]


@on_each(reference, triton)
def test_gradients_that_are_no_numbers_stay_at_their_keys(implementation: ModuleType) -> None:
    starts, keys = (12, 30), slice(0, 48)
    parts = gradients(starts, keys, (6, 6), torch.float32, batch=1)
    parts[0].own_BSX[0, 7, 1] = NAN
    parts[1].from_late_BKX[0, 20, 2] = INF
    totals = [torch.full((1, 48, 6), NAN) for _ in range(2)]
    implementation.write_key_gradients(totals, parts, starts, keys)
    found = [(~total.isfinite()).nonzero().tolist() for total in totals]
    assert found == [[[0, 31, 1]], [[0, 20, 2]]]


def test_two_parts_are_rounded_once() -> None:
    """In bf16 the sum of 1 and 2^-8 lies between two numbers; 2^-8 + 2^-8 would not be lost."""
    parts = gradients((12, 30), slice(0, 48), (6, 6), torch.bfloat16, batch=1)
    totals = [torch.empty(1, 48, 6, dtype=torch.bfloat16) for _ in range(2)]
    reference.write_key_gradients(totals, parts, (12, 30), slice(0, 48))
    part = parts[0]
    assert part.from_early_BJX is not None
    exact = part.from_late_BKX[:, :12].double() + part.from_early_BJX.double()
    assert totals[0][:, :12].equal(exact.bfloat16())
    assert is_close(totals[0][:, :12], exact, torch.bfloat16)
    assert TOLERANCE[torch.bfloat16] < 1e-2
