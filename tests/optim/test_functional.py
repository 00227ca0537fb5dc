"""The building blocks against direct formulas: batched, and pure or in place as documented."""

import pytest
import torch
from torch import Tensor

from lather.optim.functional import (
    init_kronecker_factors,
    precondition,
    update_kronecker_factors,
    update_kronecker_factors_kl,
)
from lather.optim.linalg import eigenbasis, kronecker

LETTERS = "acd"


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(batch: int, n: int, seed: int = 0) -> Tensor:
    x = randn(batch, n, 2 * n, seed=seed)
    return x @ x.mT


def close(x: Tensor, y: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def on_dim(a: Tensor, x: Tensor, dim: int) -> Tensor:
    """Multiply x (B, n_0, ...) by a (B, k, n_i) on inner dim i."""
    return torch.einsum("bij,b...j->b...i", a, x.movedim(dim + 1, -1)).movedim(-1, dim + 1)


def contraction(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Contract two tensors (B, n_0, ...) over all dims but the batch and inner dim `dim`, spelt
    out."""
    ours = "b" + LETTERS[: x.dim() - 1]
    theirs = ours.replace(ours[dim + 1], "z")
    return torch.einsum(f"{ours},{theirs}->b{ours[dim + 1]}z", x, y)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5)], ids=str)
def test_factors_are_contractions_of_the_gradient(shape: tuple[int, ...]) -> None:
    g = randn(2, *shape)
    before = g.clone()
    factors = init_kronecker_factors(g, range(len(shape)))
    for dim, k in factors.items():
        close(k, contraction(g, g, dim))
    old = {dim: k.clone() for dim, k in factors.items()}
    h = randn(2, *shape, seed=1)
    update_kronecker_factors(factors, h, 0.8)
    for dim, k in factors.items():
        close(k, 0.8 * old[dim] + 0.2 * contraction(h, h, dim))
        assert not torch.allclose(k, 0.802 * old[dim] + 0.198 * contraction(h, h, dim), rtol=1e-4)
    assert torch.equal(g, before)


def test_a_dim_without_factor_is_not_whitened() -> None:
    g = randn(1, 4, 6)
    factors = {0: torch.zeros(1, 4, 4, dtype=torch.float64)}
    update_kronecker_factors_kl(factors, {}, {0: randn(1, 4).abs()}, g, 0.0, eps=1e-8)
    close(factors[0], g @ g.mT / 6)


@pytest.mark.parametrize("active", [[0, 2], [1], []], ids=str)
def test_only_the_active_entries_of_a_batch_change(active: list[int]) -> None:
    g, index = randn(3, 4, 5), torch.tensor(active, dtype=torch.long)
    for kl in (False, True):
        factors = {dim: spd(3, n) for dim, n in enumerate((4, 5))}
        whole = {dim: k.clone() for dim, k in factors.items()}
        before = {dim: k.clone() for dim, k in factors.items()}
        if kl:
            w = {dim: randn(3, n).abs() + 0.1 for dim, n in enumerate((4, 5))}
            q = {dim: torch.linalg.qr(randn(3, n, n)).Q for dim, n in enumerate((4, 5))}
            update_kronecker_factors_kl(factors, q, w, g, 0.7, eps=1e-8, active=index)
            update_kronecker_factors_kl(whole, q, w, g, 0.7, eps=1e-8)
        else:
            update_kronecker_factors(factors, g, 0.7, index)
            update_kronecker_factors(whole, g, 0.7)
        for dim, k in factors.items():
            for entry in range(3):
                expected = whole if entry in active else before
                close(k[entry], expected[dim][entry])


@pytest.mark.parametrize("active", [None, [0, 2]], ids=["all", "some"])
@pytest.mark.parametrize("shape", [(0, 0), (3, 5), (1, 17)], ids=["even", "uneven", "more_uneven"])
def test_large_statistics_by_block_rows_are_the_same_and_symmetric(
    shape: tuple[int, int], active: list[int] | None
) -> None:
    m, n = (kronecker.SYMMETRIC_FROM + extra for extra in shape)
    g = randn(3, m, n)
    x = randn(3, m, 4, seed=1)
    k = x @ x.mT
    expected = 0.9 * k + 0.1 * (g @ g.mT)
    if active is not None:
        expected[1] = k[1]
    factors = {0: k.clone()}
    update_kronecker_factors(factors, g, 0.9, None if active is None else torch.tensor(active))
    close(factors[0], expected, 1e-10)
    close(factors[0], factors[0].mT)


def test_statistics_are_one_product_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "is_gpu", lambda x: True)
    g, k = randn(3, 300, 300), randn(3, 300, 300, seed=1)
    monkeypatch.setattr(kronecker, "SYMMETRIC_BLOCKS", 0)  # so that there are no blocks
    found = kronecker.average_(k.clone(), g, 0.9, 0.1)
    close(found, 0.9 * k + 0.1 * g @ g.mT, 1e-10)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5)], ids=str)
def test_in_and_out_are_products_with_each_basis_and_each_others_inverse(
    shape: tuple[int, ...],
) -> None:
    x = randn(2, *shape)
    before = x.clone()
    dims = [dim for dim in range(len(shape)) if dim != 1 or len(shape) < 3]
    bases = {dim: torch.linalg.qr(randn(2, *[shape[dim]] * 2, seed=dim + 1)).Q for dim in dims}
    inside, expected = precondition(x, bases, "in"), x
    for dim, q in bases.items():
        expected = on_dim(q.mT, expected, dim)
    close(inside, expected)
    close(precondition(inside, bases, "out"), x)
    assert torch.equal(x, before)
    assert precondition(x, {}, "in") is x


def test_shape_annotations_are_checked_here() -> None:
    with pytest.raises(TypeError):
        kronecker.precondition("abc", {}, "in")
    with pytest.raises(TypeError):
        eigenbasis.get_eigenbasis_svd(torch.zeros(2, 3, 4))
