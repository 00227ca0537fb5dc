"""Block masks from intervals against torch's, which calls the rule for all pairs; attention with
them against a dense softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lather.models.context import Context
from lather.models.token_positions import SequenceLayout
from models.tiny import error, random_normal

CPU = torch.device("cpu")
LENGTH = 1064
"""Tokens of a row, no multiple of 128; nor are those of the slices of 2 and 4 context ranks."""


def bounds(kind: str, batch: int, length: int) -> Tensor | None:
    if kind == "rows":
        return None
    longest = {"short": 60, "long": 700}[kind]
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, longest, (batch * length,), generator=generator).cumsum(0)
    return torch.cat(
        (torch.tensor([0]), sizes[sizes < batch * length], torch.tensor([batch * length]))
    )


def visible_blocks(numbers: Tensor | None, indices: Tensor | None) -> list[list[set[int]]]:
    """Return the valid entries of an ordered list of blocks, by row of the batch and block."""
    assert numbers is not None
    assert indices is not None
    return [
        [
            set(row[: int(number)])
            for number, row in zip(numbers_Q, indices_Qx.tolist(), strict=True)
        ]
        for numbers_Q, indices_Qx in zip(numbers[:, 0], indices[:, 0], strict=True)
    ]


def assert_same_blocks(actual: BlockMask, expected: BlockMask) -> None:
    assert actual.shape == expected.shape
    assert actual.seq_lengths == expected.seq_lengths
    assert actual.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        numbers, indices = f"{name}_num_blocks", f"{name}_indices"
        ours, theirs = (
            [getattr(mask, numbers), getattr(mask, indices)] for mask in (actual, expected)
        )
        for x, y in zip(ours, theirs, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert visible_blocks(*ours) == visible_blocks(*theirs), name


@pytest.mark.parametrize("kind", ["rows", "short", "long"])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300, LENGTH])
@pytest.mark.parametrize(
    "context",
    [None, *(Context(rank, size) for size in (2, 4) for rank in range(size))],
    ids=lambda context: "whole" if context is None else f"{context.rank} of {context.size}",
)
def test_blocks_are_those_that_torch_finds_among_all_pairs(
    kind: str, window: int | None, context: Context | None
) -> None:
    for length in (LENGTH,) if window == 100 or context else (LENGTH, 1, 127, 128, 129, 512):
        layout = SequenceLayout(2, length, CPU, bounds(kind, 2, length), context=context)
        actual = layout.block_mask(window)
        batch = 2 if layout.documents is not None else None
        sizes = layout.length, layout.num_keys
        expected = create_block_mask(actual.mask_mod, batch, None, *sizes, device=CPU)
        assert_same_blocks(actual, expected)
        assert actual.to_dense().sum() > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("context", [None, Context(1, 2)], ids=["whole", "context"])
def test_flex_attention_gives_the_same_with_either(
    window: int | None, context: Context | None
) -> None:
    layout = SequenceLayout(1, LENGTH, CPU, bounds("long", 1, LENGTH), context=context)
    ours = layout.block_mask(window)
    sizes = layout.length, layout.num_keys
    theirs = create_block_mask(ours.mask_mod, 1, None, *sizes, device=CPU)
    q, k, v = (random_normal(1, 2, size, 16, seed=size) for size in (*sizes, sizes[1] + 1))
    v = v[:, :, : sizes[1]]
    results = [flex_attention(q, k, v, block_mask=mask) for mask in (ours, theirs)]
    mask = layout.mask(window)
    dense = (q @ k.mT / 4).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    assert results[0].equal(results[1])
    assert error(results[0], dense) < 1e-12
