"""The operations on CUDA, each in one pass.

A program of the merge has a few heads of a token: two outputs and their log-sum-exps. A program of
the gradients has some columns of a few keys, of both tensors; each part is loaded where it has
these keys, and the sum is written once.

Letters: see `lather.kernels.attention_slices`; a tile is ROWS x BLOCK.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.attention_slices.reference import KeyGradients
from lather.kernels.launch import launch, tile, wide

TILE = 1024
"""Elements of a tile."""


def merge_into(y_BLHU: Tensor, lse_BHL: Tensor, other_BLHU: Tensor, other_lse_BHL: Tensor) -> None:
    batch, length, heads, width = y_BLHU.shape
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (other_BLHU, other_lse_BHL)]
    assert y_BLHU.stride(-1) == lse_BHL.stride(-1) == 1
    rows = batch * length * heads
    sizes = tile(width, TILE, whole_rows=True)
    launch(
        _merge_kernel,
        (triton.cdiv(rows, sizes["ROWS"]),),
        y_BLHU,
        lse_BHL,
        *tensors,
        rows,
        length,
        heads,
        width,
        *(stride for x in (y_BLHU, lse_BHL, *tensors) for stride in x.stride()[:-1]),
        WIDE=wide(lse_BHL),
        **sizes,
    )


@triton.jit
def _merge_kernel(
    y_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    num_rows,
    length,
    heads,
    width,
    y_batch,
    y_token,
    y_head,
    lse_batch,
    lse_head,
    other_batch,
    other_token,
    other_head,
    other_lse_batch,
    other_lse_head,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    head, token = (row % heads).to(tl.int64), (row // heads % length).to(tl.int64)
    sequence = (row // heads // length).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = is_row[:, None] & (column < width)
    lse_place = sequence * lse_batch + head * lse_head + token
    lse = tl.load(lse_ptr + lse_place, mask=is_row, other=0.0).to(WIDE)
    other_place = sequence * other_lse_batch + head * other_lse_head + token
    other_lse = tl.load(other_lse_ptr + other_place, mask=is_row, other=0.0).to(WIDE)

    most = tl.maximum(lse, other_lse)
    total = most + tl.log(1 + tl.exp(-tl.abs(lse - other_lse)))
    # the difference of equal infinities is NaN
    total = tl.where((lse == other_lse) & (tl.abs(lse) == float("inf")), lse, total)
    share = tl.where(lse == float("-inf"), 0.0, tl.exp(lse - total))
    other_share = tl.where(other_lse == float("-inf"), 0.0, tl.exp(other_lse - total))

    y_place = (sequence * y_batch + token * y_token + head * y_head)[:, None] + column
    place = (sequence * other_batch + token * other_token + head * other_head)[:, None] + column
    merged = share[:, None] * tl.load(y_ptr + y_place, mask=inside, other=0.0).to(WIDE)
    merged += other_share[:, None] * tl.load(other_ptr + place, mask=inside, other=0.0).to(WIDE)
    tl.store(y_ptr + y_place, merged.to(y_ptr.dtype.element_ty), mask=inside)
    # a warp stores these numbers, and others load them to merge outputs
    tl.debug_barrier()
    tl.store(lse_ptr + lse_place, total.to(lse_ptr.dtype.element_ty), mask=is_row)


def write_key_gradients(
    totals: Sequence[Tensor],
    parts: Sequence[KeyGradients],
    starts: tuple[int, int],
    keys: slice,
) -> None:
    assert all(total_BTX.is_contiguous() for total_BTX in totals)
    batch, num_all, key_width = totals[0].shape
    num_late, half = parts[0].from_late_BKX.shape[1], parts[0].own_BSX.shape[1] // 2
    early = parts[0].from_early_BJX
    operands = []
    for total_BTX, part in zip(totals, parts, strict=True):
        own, late, of_early = part.own_BSX, part.from_late_BKX, part.from_early_BJX
        # an unused pointer must still be valid
        sources = (own, late, own if of_early is None else of_early)
        operands += [total_BTX[:, keys], *(x.contiguous() for x in sources)]
    widths = key_width, totals[1].shape[2]
    sizes = tile(max(widths), TILE)
    launch(
        _gradients_kernel,
        (
            triton.cdiv(keys.stop - keys.start, sizes["ROWS"]),
            triton.cdiv(max(widths), sizes["BLOCK"]),
            batch,
        ),
        *operands,
        *widths,
        num_all,
        half,
        num_late,
        0 if early is None else early.shape[1],
        *starts,
        keys.start,
        keys.stop,
        WIDE=wide(*totals),
        **sizes,
    )


@triton.jit
def _gradients_kernel(
    total_key_ptr,
    own_key_ptr,
    late_key_ptr,
    early_key_ptr,
    total_value_ptr,
    own_value_ptr,
    late_value_ptr,
    early_value_ptr,
    key_width,
    value_width,
    num_all,
    half,
    num_late,
    num_early,
    early_start,
    late_start,
    first,
    stop,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    sequence = tl.program_id(2).to(tl.int64)
    key = first + number
    is_key = key < stop
    in_late, in_early = is_key & (number < num_late), is_key & (number < num_early)
    is_first = (key >= early_start) & (key < early_start + half)
    is_second = (key >= late_start) & (key < late_start + half)
    in_own = is_key & (is_first | is_second)
    late = sequence * num_late + number
    early = sequence * num_early + number
    own = sequence * 2 * half + tl.where(is_second, half + key - late_start, key - early_start)
    place = sequence * num_all + number

    total = _sum_of_parts(
        own_key_ptr, late_key_ptr, early_key_ptr, own, late, early, in_own, in_late, in_early,
        column, key_width, WIDE, ROWS, BLOCK,
    )  # fmt: skip
    tl.store(
        total_key_ptr + place[:, None] * key_width + column,
        total.to(total_key_ptr.dtype.element_ty),
        mask=is_key[:, None] & (column < key_width),
    )
    total = _sum_of_parts(
        own_value_ptr, late_value_ptr, early_value_ptr, own, late, early, in_own, in_late, in_early,
        column, value_width, WIDE, ROWS, BLOCK,
    )  # fmt: skip
    tl.store(
        total_value_ptr + place[:, None] * value_width + column,
        total.to(total_value_ptr.dtype.element_ty),
        mask=is_key[:, None] & (column < value_width),
    )


@triton.jit
def _sum_of_parts(
    own_ptr,
    late_ptr,
    early_ptr,
    own,
    late,
    early,
    in_own,
    in_late,
    in_early,
    column,
    width,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inside = column < width
    total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    mask = in_late[:, None] & inside
    total += tl.load(late_ptr + late[:, None] * width + column, mask=mask, other=0.0).to(WIDE)
    mask = in_early[:, None] & inside
    total += tl.load(early_ptr + early[:, None] * width + column, mask=mask, other=0.0).to(WIDE)
    mask = in_own[:, None] & inside
    total += tl.load(own_ptr + own[:, None] * width + column, mask=mask, other=0.0).to(WIDE)
    return total
