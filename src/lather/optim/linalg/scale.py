"""Norms of matrices of any scale, and powers of two that bring a matrix to a size near 1.

In fp32, squares of numbers above 1.8e19 overflow, and those of numbers below 1e-23 vanish. A CPU,
where reading a value costs nothing, brings matrices of such a size near 1 before it squares them. A
GPU does so only where it matters, in Newton-Schulz and for updates under `keep_norm` (moments of an
expert without tokens decay to any size), because it has to read every matrix twice more. Powers of
two change no bit of a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.device import Read, is_cpu, is_true
from lather.kernels.unit_norm import unit_norm
from lather.shapes import Float

LEAST_NORM = 2.0**-40
"""Norm from which on squares too small for fp32 are too small to count in the sum."""

LEAST_ELEMENT = 2.0**-30
"""Largest element of a factor from which on a CPU does not scale it."""


def norms(x: Float[Tensor, "b *dims"]) -> Float[Tensor, " b"]:
    """Return the Frobenius norm of each matrix of x (B, ...), in fp32, or in fp64 if x is."""
    rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    if not is_cpu(x) or not rows.numel():
        return norm
    good = (norm > LEAST_NORM) & norm.isfinite()
    if is_true(good.all(), Read.CHOICE):
        return norm
    size = powers_of_two(rows.to(dtype))
    scaled = torch.linalg.vector_norm(rows.to(dtype) / size.unsqueeze(1), dim=1)
    return norm.where(good, scaled * size)


def largest_elements(x: Float[Tensor, "b *dims"]) -> Float[Tensor, " b"]:
    """Return the largest magnitude in each matrix of x (B, ...), at least the smallest normal
    number, in fp32, or in fp64 if x is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, tuple(range(1, x.dim())), dtype=dtype)
    return largest.clamp_min(torch.finfo(dtype).tiny)


def with_unit_norms(x: Float[Tensor, "b m n"], dtype: torch.dtype) -> Float[Tensor, "b m n"]:
    """Return matrices divided by their norms, whatever these are, rounded to `dtype`; a matrix of
    zeros stays zero. On a GPU each matrix is divided by its largest element first, because looking
    at its norm first would take longer (`lather.kernels.unit_norm`); on a CPU a matrix out of range
    is divided by a power of two."""
    if not x.numel():
        return x.to(dtype)
    if not is_cpu(x):
        return unit_norm(x, dtype)
    norm = norms(x)
    tiny = torch.finfo(norm.dtype).tiny
    good = (norm >= tiny) & norm.isfinite()
    if not is_true(good.all(), Read.CHOICE):
        x = x / powers_of_two(x).where(~good, 1.0)[:, None, None]
        norm = norms(x)
    norm = norm.clamp_min(tiny)[:, None, None]
    return torch.div(x, norm, out=torch.empty_like(x, dtype=dtype))


def norms_of_any_scale(x: Float[Tensor, "b *dims"]) -> Float[Tensor, " b"]:
    """Return `norms` of x, also on a GPU of matrices whose squares fp32 does not have: it reads
    them twice more there."""
    if is_cpu(x):
        return norms(x)
    largest = largest_elements(x)
    return norms(x / largest.view(-1, *[1] * (x.dim() - 1))) * largest


def factors_between(target: Tensor, norm: Tensor) -> Tensor:
    """Return the finite numbers by which matrices of this norm have to be multiplied to have the
    target norm."""
    limits = torch.finfo(norm.dtype)
    return (target / norm.clamp_min(limits.tiny)).clamp_max(limits.max)


def powers_of_two(x: Float[Tensor, "b *dims"]) -> Float[Tensor, " b"]:
    """Return for each matrix of x (B, ...) a power of two with an even exponent, between half and
    twice its largest element, or the nearest that the dtype of x has."""
    tiny = torch.finfo(x.dtype).tiny
    largest = torch.linalg.vector_norm(x, torch.inf, tuple(range(1, x.dim()))).clamp(tiny, 1 / tiny)
    return torch.exp2(torch.frexp(largest).exponent.bitwise_and(-2).to(x.dtype))


def near_one(k: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """Return each matrix divided by its power of two, so that the squares of its elements are in
    the range of their dtype. On a CPU, matrices whose squares are far inside that range stay as
    they are: the largest elements of a factor are on its diagonal."""
    if is_cpu(k):
        largest = k.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
        in_range = (largest > LEAST_ELEMENT) & (largest < 1 / LEAST_ELEMENT)
        if is_true(in_range.all(), Read.CHOICE):
            return k
    return k / powers_of_two(k)[:, None, None]


def column(x: Tensor, like: Tensor) -> Tensor:
    """Return x, (B,) or (B, m), in a shape that multiplies the matrices, or rows, of `like`."""
    return x.view(*x.shape, *[1] * (like.dim() - x.dim()))
