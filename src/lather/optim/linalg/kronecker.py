"""Kronecker factors, which average products of the gradient with itself, and multiplication of a
tensor by bases.

Source: Shampoo (Gupta, Koren, Singer, arXiv:1802.09568), as SOAP uses it (Vyas et al.,
arXiv:2409.11321, algorithm 3). For a matrix G (m x n) the factors are L = E[G G^T] and R = E[G^T
G]; a tensor has one per dim, contracted over all other dims. The KL form (Lin et al.,
arXiv:2509.03378) weighs the other dims by their inverse factors: L = E[G R^{-1} G^T] / n, R = E[G^T
L^{-1} G] / m; the fixed point minimizes the KL divergence between the covariance of the gradients
and the Kronecker product. All tensors have a leading batch dim B. A dim without factor or basis is
not transformed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from lather.device import Read, is_cpu, is_gpu, is_true
from lather.kernels.symmetric_product import add_symmetric_product, symmetric_product
from lather.optim.linalg.scale import LEAST_NORM
from lather.shapes import Float, Int

Matrices = Mapping[int, Float[Tensor, "b _ _"]]
"""Inner dim i -> its matrices (B, n_i, n_i): symmetric factors, or bases."""

ROUNDING = 64
"""Multiple of the rounding unit up to which a share of a matrix's norm counts as rounding.
Measured: 0.4 in fp32 where bases come from eigendecompositions or QR; Newton-Schulz itself leaves
directions of so small a share at 0.4 % of the others."""

SYMMETRIC_FROM = 256
"""Least size of both sides of x for which a CPU computes x x^T by block rows (measured: 15 to 30 %
less time above it, more below)."""

SYMMETRIC_BLOCKS = 4


def unfold(x: Float[Tensor, "b *dims"], dim: int) -> Float[Tensor, "b n rest"]:
    """Return `x` as matrices: inner dim `dim` as rows, all other inner dims flattened into
    columns."""
    return x.movedim(dim + 1, 1).flatten(2) if x.dim() > 2 else x.unsqueeze(-1)


def apply_transposed(
    a: Float[Tensor, "b n k"], x: Float[Tensor, "b *dims"], dim: int
) -> Float[Tensor, "b *dims"]:
    """Multiply x by a^T on inner dim `dim`."""
    if x.dim() == 2:
        return (x.unsqueeze(1) @ a).squeeze(1)
    if x.dim() == 3:
        return a.mT @ x if dim == 0 else x @ a
    rows = x.movedim(dim + 1, -1)
    return (rows.flatten(1, -2) @ a).view(rows.shape).movedim(-1, dim + 1)


def precondition(
    x: Float[Tensor, "b *dims"], bases: Matrices, direction: Literal["in", "out"]
) -> Float[Tensor, "b *dims"]:
    """Transform x into the eigenbases ("in": Q_L^T X Q_R for a matrix, and in general Q_i^T on each
    dim i) or back ("out": Q_L X Q_R^T)."""
    for dim, q in bases.items():
        x = apply_transposed(q if direction == "in" else q.mT, x, dim)
    return x


def without_rounding(bases: Matrices, x: Float[Tensor, "b *dims"]) -> Matrices:
    """Return the bases, with zeros in place of each vector along which `x`, in their coordinates,
    is no more than the rounding of the products that made it.

    Such is a direction without gradients, as of a row that is always zero. Divided by the root of
    its second moment, its rounding would become an update as large as any other."""
    if not bases:
        return bases
    sizes = {}
    for dim in bases:
        others = (*range(1, dim + 1), *range(dim + 2, x.dim()))
        sizes[dim] = torch.linalg.vector_norm(x, dim=others) if others else x.abs()
    norm = torch.linalg.vector_norm(sizes[dim], dim=1, keepdim=True)
    # squares of what is far below the least norm vanish, so that such a matrix keeps all vectors
    least = (norm - LEAST_NORM) * (ROUNDING * torch.finfo(x.dtype).eps)
    rounded = {dim: size < least for dim, size in sizes.items()}
    if is_cpu(x) and not is_true(torch.cat(tuple(rounded.values()), 1).any(), Read.CHOICE):
        return bases
    return {dim: q.masked_fill(rounded[dim][:, None], 0.0) for dim, q in bases.items()}


def init_kronecker_factors(g: Float[Tensor, "b *dims"], dims: Iterable[int]) -> dict[int, Tensor]:
    """Return the factors (B, n, n) of a gradient `g` alone, by inner dim."""
    return {dim: x @ x.mT for dim in dims for x in [unfold(g, dim)]}


def update_kronecker_factors(
    factors: Matrices,
    g: Float[Tensor, "b *dims"],
    beta: float,
    active: Int[Tensor, " k"] | None = None,
) -> None:
    """Set K_i = beta K_i + (1 - beta) (product of g unfolded on dim i with its transpose) in place,
    for the matrices `active` (None: all)."""
    g = g if active is None else g[active]
    for dim, k in factors.items():
        average_(k, unfold(g, dim), beta, 1 - beta, active)


def update_kronecker_factors_kl(
    factors: Matrices,
    bases: Matrices,
    eigenvalues: Mapping[int, Float[Tensor, "b _"]],
    g: Float[Tensor, "b *dims"],
    beta: float,
    *,
    eps: float,
    active: Int[Tensor, " k"] | None = None,
) -> None:
    """Set K_i = beta K_i + (1 - beta) n_i / numel(g) X X^T in place, for the matrices `active`
    (None: all).

    X is g unfolded on dim i, after g is whitened on every other dim j that has a factor: multiplied
    by Q_j^T and divided by the root of max(eigenvalues_j, eps). A dim that is not in `bases` has
    the identity as basis.
    """
    rows = slice(None) if active is None else active
    g = g[rows]
    for dim, k in factors.items():
        x = g
        for other in [j for j in factors if j != dim]:
            x = apply_transposed(bases[other][rows], x, other) if other in bases else x
            scale = eigenvalues[other][rows].clamp_min(eps).rsqrt()
            x = x * scale.view(len(x), *(n if j == other else 1 for j, n in enumerate(x.shape[1:])))
        average_(k, unfold(x, dim), beta, (1 - beta) * k.shape[-1] / math.prod(g.shape[1:]), active)


def gram(x: Tensor) -> Tensor:
    """Return x x^T for x (B, n, rest)."""
    if is_gpu(x):
        return symmetric_product(x)
    if is_formed_whole(x):
        return x @ x.mT
    return average_(x.new_zeros(len(x), x.shape[1], x.shape[1]), x, 0.0, 1.0)


def is_formed_whole(x: Tensor) -> bool:
    """Whether x x^T for x (B, n, rest) is computed by one operation, and not by block rows."""
    return min(x.shape[1:]) < SYMMETRIC_FROM or x.dtype == torch.bfloat16 or is_gpu(x)


def average_(
    k: Tensor, x: Tensor, beta: float, weight: float, active: Tensor | None = None
) -> Tensor:
    """Set k = beta k + weight x x^T in place, for x (B, n, rest), for the matrices `active` (None:
    all), and return k.

    On a CPU, large products are computed by block rows up to the diagonal and mirrored, which takes
    5/8 of the flops: torch has no symmetric rank-k product. In bf16 the whole product takes less
    time than the copies would; a GPU has a kernel (`lather.kernels.symmetric_product`).
    """
    n = k.shape[-1]
    if active is not None:
        k[active] = average_(k[active], x, beta, weight)
    elif is_gpu(x):
        add_symmetric_product(k, x, beta=beta, alpha=weight, out=k)
    elif is_formed_whole(x):
        k.baddbmm_(x, x.mT, beta=beta, alpha=weight)
    else:
        height = -(-n // SYMMETRIC_BLOCKS)
        for start in range(0, n, height):
            stop = min(start + height, n)
            row = k[:, start:stop, :stop]
            row.mul_(beta).add_(x[:, start:stop] @ x[:, :stop].mT, alpha=weight)
            k[:, :start, start:stop] = row[:, :, :start].mT
    return k


def bias_corrected_beta(beta: float, step: int) -> float:
    """Return the decay rate that makes an average without bias if it starts with the first
    gradient: 1 - (1 - beta) / (1 - beta^(t+1))."""
    return 1 - (1 - beta) / (1 - beta ** (step + 1)) if beta < 1 else beta
