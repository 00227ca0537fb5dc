"""The lookup of an embedding, whose gradient is added to the one that exists in tiles of rows.

Autograd computes the gradient of the whole table for every micro-batch (1.2 GiB for 151,936 rows of
2,048) and adds it to `.grad`. Here the gradient of a tile of rows exists at a time. Each row is the
sum over the same tokens in the same order, so the bits are the same. The price is a pass over the
tokens for each tile.

Letters: V rows of the table, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.shapes import Float, Int

TILE_ELEMENTS = 2**25
"""Elements of a tile, at most: 128 MiB in fp32."""


def look_up(weight: Float[Tensor, "v d"], tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "..."]:
    """Return the rows of `weight`, a leaf, for the tokens, as `F.embedding` does. Hooks on `weight`
    do not run in a backward pass that finds a gradient."""
    return _LookUp.apply(weight, tokens)  # type: ignore[no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        num_rows, dim = weight.shape
        gradient = torch.ops.aten.embedding_dense_backward
        if weight.grad is None:
            return gradient(grad, tokens, num_rows, -1, False), None
        tile = max(1, TILE_ELEMENTS // dim)
        for total_CD in weight.grad.split(tile):
            rows = len(total_CD)
            is_inside = (tokens >= 0) & (tokens < rows)
            # tokens of other tiles have the last row, which is left out
            inside = torch.where(is_inside, tokens, rows)
            total_CD.add_(gradient(grad, inside, rows + 1, rows, False)[:rows])
            tokens = tokens - rows
        return None, None
