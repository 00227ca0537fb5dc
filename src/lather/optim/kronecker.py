"""Kronecker factor statistics: an exponential moving average of a gradient's contractions with itself.

Source: Shampoo (Gupta, Koren, Singer, arXiv:1802.09568), as SOAP uses it (Vyas et al., arXiv:2409.11321, algorithm 3). For a matrix
G (m x n) the factors are L = E[G G^T] and R = E[G^T G]; a tensor has one per dim, contracted over all other dims.
Everything carries a leading batch dim B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from lather.shapes import Bool, Float

Factors = dict[int, Tensor]
"""Inner dim i -> its matrices (B, n_i, n_i), symmetric."""


def unfold(x: Float[Tensor, "b *dims"], dim: int) -> Float[Tensor, "b n rest"]:
    """Inner dim `dim` of `x` as rows, all other inner dims flattened into columns."""
    return x.movedim(dim + 1, 1).flatten(2) if x.dim() > 2 else x.unsqueeze(-1)


def init_kronecker_factors(g: Float[Tensor, "b *dims"], dims: Iterable[int]) -> Factors:
    """The factors of `g` alone, one (B, n, n) per inner dim in `dims`."""
    rows = {dim: unfold(g, dim) for dim in dims}
    return {dim: x @ x.mT for dim, x in rows.items()}


def update_kronecker_factors(
    factors: Mapping[int, Float[Tensor, "b _ _"]],
    g: Float[Tensor, "b *dims"],
    beta: float,
    keep: Bool[Tensor, " b"] | None = None,
) -> None:
    """In place: K_i = beta K_i + (1 - beta) (contraction of g with itself on dim i), except for the batch entries in `keep`."""
    for dim, k in factors.items():
        x = unfold(g, dim)
        if keep is None:
            k.baddbmm_(x, x.mT, beta=beta, alpha=1 - beta)
        else:
            k.copy_(k.where(keep[:, None, None], k.baddbmm(x, x.mT, beta=beta, alpha=1 - beta)))


def bias_corrected_beta(beta: float, step: int) -> float:
    """The decay that makes an average started from the first gradient unbiased: 1 - (1 - beta) / (1 - beta^(t+1))."""
    return 1 - (1 - beta) / (1 - beta ** (step + 1)) if beta < 1 else beta
