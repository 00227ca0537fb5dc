"""Packed triangles in torch: the specification.

Letters: h the columns of the rectangle, t = n - h the other columns of the matrix. For an even n,
the rectangle has a row more than the matrix, above it, and its corner begins in the first column;
for an odd n the corner begins in the second.

Codes of 16 bits of an element are

    code = floor(x_ij r_i r_j + u),  r = 1 / s,  s = sqrt(x_ii) / sqrt(LARGEST)

with u one of 1/32, 3/32, ... 31/32, by a hash of the scaled element and the step. The errors of
rounding in s, r and the products move a code that is decoded and encoded again by less than 1/32,
so that it stays the same."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.stochastic_rounding.reference import CHUNK, noise

PANEL = 32
"""Columns that are copied to rows at a time."""

LARGEST = 2**15 - 1
"""Largest code, of an element that is the root of the product of its two diagonal elements."""

UNIT = LARGEST**-0.5

NOISE_BITS = 4


def pack_triangle(x: Tensor, out: Tensor) -> None:
    below, corner, h, t = _parts(out, x.shape[-1])
    below.copy_(x[..., :h])
    corner.copy_(torch.where(_upper(t, x), x[..., h:, h:].to(out.dtype), corner))


def unpack_triangle(packed: Tensor, out: Tensor) -> None:
    _unpack_lower(packed, out)
    _mirror_(out)


def quantize_triangle(x: Tensor, codes: Tensor, diagonal: Tensor, step: int) -> None:
    diagonal.copy_(x.diagonal(dim1=-2, dim2=-1))
    s = _scales(diagonal)
    r = torch.where(s > 0, s.reciprocal(), 0.0)
    rows, columns = r.unsqueeze(-1), r.unsqueeze(-2)
    scaled = torch.empty_like(codes, dtype=torch.float32)
    below, corner, h, t = _parts(scaled, x.shape[-1])
    torch.mul(x[..., :h], rows, out=below)
    below.mul_(columns[..., :h])
    others = (x[..., h:, h:] * rows[..., h:, :]).mul_(columns[..., h:])
    corner.copy_(torch.where(_upper(t, x), others, corner))
    for y, code in zip(*(z.view(-1).split(CHUNK) for z in (scaled, codes)), strict=True):
        u = noise(y.view(torch.int32), step, NOISE_BITS).float().add_(2 ** (NOISE_BITS - 1) + 0.5)
        code.copy_(y.add_(u, alpha=2.0**-NOISE_BITS).floor_().clamp_(-LARGEST, LARGEST))


def dequantize_triangle(codes: Tensor, diagonal: Tensor, out: Tensor) -> None:
    s = _scales(diagonal)
    _unpack_lower(codes, out)
    out.mul_(s.unsqueeze(-1)).mul_(s.unsqueeze(-2))
    out.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    _mirror_(out)


def _scales(diagonal: Tensor) -> Tensor:
    """Return s. Roots in fp64 become the nearest in fp32, which those in fp32 on a CPU are not
    always."""
    return diagonal.clamp(min=0.0).double().sqrt_().float().mul_(UNIT)


def _unpack_lower(packed: Tensor, out: Tensor) -> None:
    """Fill the lower triangles of matrices; elements above them are left without meaning."""
    below, corner, h, _ = _parts(packed, out.shape[-1])
    out[..., :h] = below
    out[..., h:, h:] = corner
    _mirror_(out[..., h:, h:].mT)


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
