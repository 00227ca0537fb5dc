"""Slices of sequences as rows: what lies before a row, and the documents of its tokens."""

from __future__ import annotations

import torch

from lather.models.context import Context
from lather.models.token_positions import SequenceLayout

CPU = torch.device("cpu")


def test_rows_are_slices_behind_what_is_before_them() -> None:
    """Two sequences of 16 tokens in documents of 5, 3, 8, 4 and 12: slices of 4 on two ranks."""
    bounds = torch.tensor([0, 5, 8, 16, 20, 32])
    numbers = [[0] * 5 + [1] * 3 + [2] * 8, [3] * 4 + [4] * 12]
    for rank, (first, last) in enumerate([(0, 12), (4, 8)]):
        layout = SequenceLayout(2, 16, CPU, bounds, context=Context(rank, 2))
        slices = layout.slices(3)
        assert slices is not None
        assert slices is layout.slices(3)
        rows = [([-1] * 3 + row)[start : start + 7] for row in numbers for start in (first, last)]
        assert slices.document_RU is not None
        assert slices.document_RU.tolist() == rows
        assert slices.cu_seqlens is not None
        starts = {0: [0, 4, 8, 12, 16], 1: [0, 1, 4, 8, 12, 16]}
        assert slices.cu_seqlens.tolist() == starts[rank]
        assert slices.continues_BN is not None
        assert slices.continues_BN.tolist() == [
            [False, True, False, True],
            [False, False, True, True],
        ]
        x_BSC = torch.arange(48.0).view(2, 8, 3)
        rows_RPC = slices.rows(x_BSC)
        assert rows_RPC[1].equal(x_BSC[0, 4:])
        assert slices.positions(rows_RPC).equal(x_BSC)


def test_without_documents_or_a_context_there_are_none() -> None:
    assert SequenceLayout(2, 16, CPU).slices(3) is None
    slices = SequenceLayout(2, 16, CPU, context=Context(0, 2)).slices(3)
    assert slices is not None
    assert slices.document_RU is slices.cu_seqlens is slices.continues_BN is None
