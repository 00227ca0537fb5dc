"""Packed triangles in torch: the specification.

Letters: h the columns of the rectangle, t = n - h the other columns of the matrix. For an even n,
the rectangle has a row more than the matrix, above it, and its corner begins in the first column;
for an odd n the corner begins in the second."""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 32
"""Columns that are copied to rows at a time."""


def pack_triangle(x: Tensor, out: Tensor) -> None:
    below, corner, h, t = _parts(out, x.shape[-1])
    below.copy_(x[..., :h])
    corner.copy_(torch.where(_upper(t, x), x[..., h:, h:].to(out.dtype), corner))


def unpack_triangle(packed: Tensor, out: Tensor) -> None:
    below, corner, h, _ = _parts(packed, out.shape[-1])
    out[..., :h] = below
    out[..., h:, h:] = corner
    _mirror_(out[..., h:, h:].mT)
    _mirror_(out)


def _mirror_(x: Tensor) -> None:
    """Copy the lower triangles of x (..., n, n) to the upper ones, in panels that fit the cache."""
    for start in range(0, x.shape[-1], PANEL):
        panel = x[..., start : start + PANEL, :]
        stop = start + panel.shape[-2]
        x[..., :start, start:stop] = panel[..., :start].mT
        block = panel[..., start:stop]
        block.copy_(torch.where(_upper(stop - start, x), block.mT, block))


def _parts(packed: Tensor, n: int) -> tuple[Tensor, Tensor, int, int]:
    """Return views of the rectangle: the first h columns (n, h), whose upper triangle is not
    theirs, and the corner (t, t), whose upper triangle with its diagonal is that of the other
    columns; then h and t."""
    h, is_odd = (n + 1) // 2, n % 2
    t = n - h
    rectangle = packed.unflatten(-1, (n + 1 - is_odd, h))
    return rectangle[..., 1 - is_odd :, :], rectangle[..., :t, is_odd : is_odd + t], h, t


def _upper(n: int, like: Tensor) -> Tensor:
    """Return which elements of a matrix (n, n) are on its diagonal or above it."""
    return torch.ones(n, n, dtype=torch.bool, device=like.device).triu_()
