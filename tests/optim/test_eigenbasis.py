"""Eigenbases: what each method finds, how moments follow them, and the consequences of a
decomposition that fails."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lather.optim.functional import (
    get_eigenbasis_eigh,
    get_eigenbasis_qr,
    get_eigenbasis_svd,
    precondition,
    update_eigenbasis_and_momentum,
)
from lather.optim.linalg.eigenbasis import is_still_diagonal, rayleigh_quotients

METHODS = ["qr", "cholesky_qr", "root_qr", "auto"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(batch, n, n, seed=100 + seed)).Q


def spd(batch: int, n: int, seed: int = 0) -> Tensor:
    """Make matrices with well separated eigenvalues 1, 2, 3, ... in a random basis."""
    q = basis(batch, n, seed)
    return (q * torch.arange(1.0, n + 1, dtype=torch.float64)) @ q.mT


def off_diagonal(k: Tensor, q: Tensor) -> float:
    rotated = q.mT @ k @ q
    return float((rotated - rotated.diagonal(dim1=-2, dim2=-1).diag_embed()).abs().max())


@pytest.mark.parametrize("how", ["eigh", "svd"])
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_eigenvectors_with_eigenvalues_descending(how: str, n: int) -> None:
    k = spd(3, n)
    before = k.clone()
    q = get_eigenbasis_eigh(k)[0] if how == "eigh" else get_eigenbasis_svd(k)
    assert off_diagonal(k, q) < 1e-11
    torch.testing.assert_close(
        rayleigh_quotients(k, q),
        torch.arange(n, 0.0, -1, dtype=torch.float64).expand(3, n),
        rtol=1e-11,
        atol=0,
    )
    assert torch.equal(k, before)


def test_svd_is_orthonormal_in_the_null_space() -> None:
    x = randn(2, 6, 2)
    q = get_eigenbasis_svd(x @ x.mT)
    torch.testing.assert_close(
        q.mT @ q, torch.eye(6, dtype=torch.float64).expand(2, 6, 6), rtol=0, atol=1e-12
    )
    assert off_diagonal(x @ x.mT, q) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_one_step_of_orthogonal_iteration(n: int, method: str) -> None:
    """The columns are put into descending order of their Rayleigh quotients, and then qr(K Q) is
    taken, up to signs."""
    k, q = spd(3, n), basis(3, n, 5)
    before = k.clone(), q.clone()
    q_new, order = get_eigenbasis_qr(k, q, method=method)
    assert torch.equal(
        order, torch.einsum("bji,bjk,bki->bi", q, k, q).argsort(dim=-1, descending=True)
    )
    ordered = torch.stack([one[:, columns] for one, columns in zip(q, order, strict=True)])
    for steps in (1, 3):
        q_new, order_again = get_eigenbasis_qr(k, q, power_iter_steps=steps, method=method)
        expected = ordered
        for _ in range(steps):
            expected = torch.linalg.qr(k @ expected).Q
        assert torch.equal(order_again, order)
        torch.testing.assert_close(
            (q_new * expected).sum(-2).abs(),
            torch.ones(3, n, dtype=torch.float64),
            rtol=0,
            atol=1e-11,
        )
    assert torch.equal(k, before[0])
    assert torch.equal(q, before[1])


def test_orthogonal_iteration_converges_to_what_eigh_finds() -> None:
    k, q = spd(2, 6), basis(2, 6, 3)
    expected, _ = get_eigenbasis_eigh(k)
    for method in METHODS:
        found, _ = get_eigenbasis_qr(k, q, power_iter_steps=200, method=method)
        torch.testing.assert_close(found.abs(), expected.abs(), rtol=0, atol=1e-9)


# --- moments --------------------------------------------------------------------------------------

SHAPES = [(5,), (5, 7), (7, 5), (3, 4, 5)]


@pytest.mark.parametrize("second_moment", ["permute", "rotate"])
@pytest.mark.parametrize("method", [*METHODS, "eigh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_moment_is_the_same_outside_whatever_the_basis(
    shape: tuple[int, ...], method: str, second_moment: str
) -> None:
    m, v = randn(2, *shape), randn(2, *shape, seed=1).square()
    bases = {dim: basis(2, n, dim) for dim, n in enumerate(shape)}
    old = {dim: q.clone() for dim, q in bases.items()}
    outside, start, mass = precondition(m, bases, "out"), v.clone(), v.sum(tuple(range(1, v.dim())))
    for dim, n in enumerate(shape):
        k = spd(2, n, 50 + dim)
        failed = update_eigenbasis_and_momentum(
            k, bases[dim], m, v, dim, method=method, second_moment=second_moment
        )
        assert not failed.any()
        assert not torch.allclose(bases[dim], old[dim])
    torch.testing.assert_close(precondition(m, bases, "out"), outside, rtol=0, atol=1e-12)
    if second_moment == "rotate":
        expected = start
        for dim, q in bases.items():
            squares = (q.mT @ old[dim]).square()
            expected = torch.einsum(
                "bij,b...j->b...i", squares, expected.movedim(dim + 1, -1)
            ).movedim(-1, dim + 1)
        torch.testing.assert_close(v, expected, rtol=1e-12, atol=1e-14)
        assert v.min() >= 0
        torch.testing.assert_close(v.sum(tuple(range(1, v.dim()))), mass, rtol=1e-12, atol=0)
    else:
        assert torch.equal(v.flatten(1).sort().values, start.flatten(1).sort().values)


def test_permuting_moves_the_second_moment_with_its_columns() -> None:
    """A diagonal factor is out of order: its columns, and everything kept in their coordinates,
    must be put in order together."""
    k, q = torch.diag(torch.tensor([1.0, 3.0, 2.0])).unsqueeze(0), torch.eye(3).unsqueeze(0)
    for method in METHODS:
        basis_, m, v = (
            q.clone(),
            torch.tensor([[10.0, 30.0, 20.0]]),
            torch.tensor([[1.0, 3.0, 2.0]]),
        )
        w = torch.zeros(1, 3)
        update_eigenbasis_and_momentum(k, basis_, m, v, 0, method=method, eigenvalues=w)
        assert v.tolist() == [[3.0, 2.0, 1.0]]
        torch.testing.assert_close(m.abs(), torch.tensor([[30.0, 20.0, 10.0]]))
        assert basis_.abs()[0].argmax(0).tolist() == [1, 2, 0]
        torch.testing.assert_close(w, torch.tensor([[3.0, 2.0, 1.0]]))


@pytest.mark.parametrize("method", [*METHODS, "eigh"])
def test_eigenvalues_are_those_of_the_new_basis_in_descending_order(method: str) -> None:
    k, q, m, v, w = (
        spd(3, 9),
        basis(3, 9, 4),
        randn(3, 9, 4),
        randn(3, 9, 4).square(),
        torch.zeros(3, 9, dtype=torch.float64),
    )
    before = v.clone()
    update_eigenbasis_and_momentum(k, q, m, v, 0, method=method, eigenvalues=w)
    torch.testing.assert_close(w, torch.einsum("bji,bjk,bki->bi", q, k, q), rtol=1e-12, atol=1e-12)
    assert bool((w[:, :-1] >= w[:, 1:]).all())
    assert torch.equal(v.sort(1).values, before.sort(1).values)


# --- failures -------------------------------------------------------------------------------------


def test_a_matrix_that_fails_keeps_everything_to_the_bit() -> None:
    for method in ("cholesky_qr", "eigh", "qr"):
        k, q, m, v, w = (
            spd(3, 5),
            basis(3, 5, 4),
            randn(3, 5, 4),
            randn(3, 5, 4).square(),
            randn(3, 5).abs(),
        )
        k[1] = torch.nan
        before = [x.clone() for x in (q, m, v, w)]
        failed = update_eigenbasis_and_momentum(
            k, q, m, v, 0, method=method, second_moment="rotate", eigenvalues=w
        )
        assert failed.tolist() == [False, True, False]
        for x, old in zip((q, m, v, w), before, strict=True):
            assert torch.equal(x[1], old[1])
            assert not torch.equal(x[0], old[0])
            assert bool(x.isfinite().all())


def test_eigh_that_fails_in_fp32_is_retried_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def fails_in_fp32(k: Tensor) -> Any:
        if k.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(k)

    k = spd(3, 5).float()
    expected, _ = get_eigenbasis_eigh(k)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    found, failed = get_eigenbasis_eigh(k)
    assert not failed.any()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=0, atol=1e-5)


def test_eigh_that_is_not_finite_is_retried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def nan_in_fp32(k: Tensor) -> Any:
        found = real(k)
        if k.dtype == torch.float32:
            found.eigenvectors.fill_(torch.nan)
        return found

    monkeypatch.setattr(torch.linalg, "eigh", nan_in_fp32)
    q, failed = get_eigenbasis_eigh(spd(2, 5).float())
    assert not failed.any()
    assert off_diagonal(spd(2, 5), q.double()) < 1e-4


def test_one_bad_matrix_does_not_cost_the_others_their_basis() -> None:
    k, old = spd(3, 4), basis(3, 4, 9)
    k[1] = torch.nan
    q, failed = get_eigenbasis_eigh(k, old)
    assert failed.tolist() == [False, True, False]
    assert torch.equal(q[1], old[1])
    assert off_diagonal(k[::2], q[::2]) < 1e-12
    assert torch.equal(get_eigenbasis_eigh(k)[0][1], torch.eye(4, dtype=torch.float64))


def test_a_factor_of_zeros_has_the_identity_as_basis() -> None:
    q, failed = get_eigenbasis_eigh(
        torch.stack([torch.zeros(4, 4, dtype=torch.float64), spd(1, 4)[0]])
    )
    assert not failed.any()
    assert torch.equal(q[0], torch.eye(4, dtype=torch.float64))


def test_the_criterion_is_the_share_of_the_diagonal() -> None:
    """For [[1, x], [x, 1]] |diag| / |K| is 1 / sqrt(1 + x^2), about 1 - x^2 / 2."""
    k, q = (
        torch.tensor([[1.0, 0.1], [0.1, 1.0]], dtype=torch.float64).unsqueeze(0),
        torch.eye(2, dtype=torch.float64).unsqueeze(0),
    )
    share = 1 - (1 + 0.1**2) ** -0.5
    assert is_still_diagonal(k, q, 1.01 * share).tolist() == [True]
    assert is_still_diagonal(k, q, 0.99 * share).tolist() == [False]
    turned, w = basis(1, 2), torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert is_still_diagonal((turned * w) @ turned.mT, turned, 1e-12).tolist() == [True]
