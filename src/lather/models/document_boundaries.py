"""The boundaries of packed documents among the tokens of a batch, as in flash-attention's varlen
functions (`cu_seqlens`).

Letters: B sequences, S positions, N boundaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.device import Read, read
from lather.shapes import Bool, Int


def check_boundaries(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise TypeError or ValueError unless these are boundaries of documents with this number of
    tokens in total."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"cu_seqlens is {cu_seqlens.dtype}: it must be int32 or int64, the boundaries of the "
            "documents"
        )
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: it must be one row of two or more "
            f"boundaries, 0 to {num_tokens}"
        )
    bounds = read(cu_seqlens, Read.BOUNDS)
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}: it must go from 0 to batch * "
            f"length = {num_tokens}, "
            "so that every token is in a document"
        )
    falls = (bounds.diff() < 0).nonzero()
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"cu_seqlens falls from {bounds[at]} to {bounds[at + 1]} at entry {at + 1}: boundaries "
            "must ascend"
        )


def document_boundaries(begins_BS: Bool[Tensor, "b s"]) -> Int[Tensor, " n"]:
    """Return the boundaries of documents among the B * S tokens: 0, the first token of each
    document, B * S."""
    edges = torch.tensor([0, begins_BS.numel()], device=begins_BS.device)
    return torch.cat((edges, begins_BS.flatten().nonzero().flatten())).unique()
