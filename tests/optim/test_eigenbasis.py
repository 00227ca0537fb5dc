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


def close(x: Tensor, y: Tensor, atol: float = 1e-11) -> None:
    torch.testing.assert_close(x, y.to(x).expand_as(x), rtol=0, atol=atol)


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
    close(rayleigh_quotients(k, q), torch.arange(n, 0.0, -1), 1e-10)
    assert torch.equal(k, before)


def test_svd_is_orthonormal_in_the_null_space() -> None:
    x = randn(2, 6, 2)
    q = get_eigenbasis_svd(x @ x.mT)
    close(q.mT @ q, torch.eye(6), 1e-12)
    assert off_diagonal(x @ x.mT, q) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_one_step_of_orthogonal_iteration(n: int, method: str) -> None:
    """The columns are put into descending order of their Rayleigh quotients, and then qr(K Q) is
    taken, up to signs."""
    k, q = spd(3, n), basis(3, n, 5)
    before = k.clone(), q.clone()
    q_new, order = get_eigenbasis_qr(k, q, method=method)
    w = torch.einsum("bji,bjk,bki->bi", q, k, q)
    assert torch.equal(order, w.argsort(dim=-1, descending=True))
    ordered = torch.stack([one[:, columns] for one, columns in zip(q, order, strict=True)])
    for steps in (1, 3):
        q_new, order_again = get_eigenbasis_qr(k, q, power_iter_steps=steps, method=method)
        expected = ordered
        for _ in range(steps):
            expected = torch.linalg.qr(k @ expected).Q
        assert torch.equal(order_again, order)
        close((q_new * expected).sum(-2).abs(), torch.ones(n))
    assert torch.equal(k, before[0])
    assert torch.equal(q, before[1])


def test_orthogonal_iteration_converges_to_what_eigh_finds() -> None:
    k, q = spd(2, 6), basis(2, 6, 3)
    expected, _ = get_eigenbasis_eigh(k)
    for method in METHODS:
        found, _ = get_eigenbasis_qr(k, q, power_iter_steps=200, method=method)
        close(found.abs(), expected.abs(), 1e-9)


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
    outside, start = precondition(m, bases, "out"), v.clone()
    for dim, n in enumerate(shape):
        options = {"method": method, "second_moment": second_moment}
        k = spd(2, n, 50 + dim)
        assert not update_eigenbasis_and_momentum(k, bases[dim], m, v, dim, **options).any()
        assert not torch.allclose(bases[dim], old[dim])
    close(precondition(m, bases, "out"), outside)
    if second_moment == "rotate":
        expected = start
        for dim, q in bases.items():
            squares, x = (q.mT @ old[dim]).square(), expected.movedim(dim + 1, -1)
            expected = torch.einsum("bij,b...j->b...i", squares, x).movedim(-1, dim + 1)
        close(v, expected, 1e-12)
        assert v.min() >= 0
        close(v.flatten(1).sum(1), start.flatten(1).sum(1))
    else:
        assert torch.equal(v.flatten(1).sort().values, start.flatten(1).sort().values)


def test_permuting_moves_the_second_moment_with_its_columns() -> None:
    """A diagonal factor is out of order: its columns, and everything kept in their coordinates,
    must be put in order together."""
    for method in METHODS:
        v, w, q = torch.tensor([[1.0, 3.0, 2.0]]), torch.zeros(1, 3), torch.eye(3).unsqueeze(0)
        k, m = torch.diag_embed(v), 10 * v
        update_eigenbasis_and_momentum(k, q, m, v, 0, method=method, eigenvalues=w)
        assert v.tolist() == [[3.0, 2.0, 1.0]]
        close(m.abs(), torch.tensor([[30.0, 20.0, 10.0]]), 1e-4)
        assert q.abs()[0].argmax(0).tolist() == [1, 2, 0]
        close(w, torch.tensor([[3.0, 2.0, 1.0]]), 1e-5)


def drawn(n: int) -> list[Tensor]:
    """Draw a factor, a basis, moments and eigenvalues of three matrices."""
    moments = [randn(3, n, 4), randn(3, n, 4).square()]
    return [spd(3, n), basis(3, n, 4), *moments, randn(3, n).abs()]


@pytest.mark.parametrize("method", [*METHODS, "eigh"])
def test_eigenvalues_are_those_of_the_new_basis_in_descending_order(method: str) -> None:
    k, q, m, v, w = drawn(9)
    before = v.clone()
    update_eigenbasis_and_momentum(k, q, m, v, 0, method=method, eigenvalues=w)
    close(w, torch.einsum("bji,bjk,bki->bi", q, k, q))
    assert bool((w[:, :-1] >= w[:, 1:]).all())
    assert torch.equal(v.sort(1).values, before.sort(1).values)


def test_eigenvalues_that_a_step_of_iteration_brings_out_of_order_are_sorted_with_all_else() -> (
    None
):
    """The second moment follows the columns of the old basis in the order of the new one."""
    k, q, m, v, w = drawn(9)
    v.copy_(torch.arange(9.0)[:, None].expand_as(v))
    _, order = get_eigenbasis_qr(k, q)
    iterated, _ = get_eigenbasis_qr(k, q)
    again = rayleigh_quotients(k, iterated).argsort(-1, descending=True)
    assert not torch.equal(again, torch.arange(9).expand_as(again))
    update_eigenbasis_and_momentum(k, q, m, v, 0, eigenvalues=w)
    assert torch.equal(v[..., 0], order.gather(-1, again).double())


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cholesky_qr", "eigh", "qr"])
def test_a_matrix_that_fails_keeps_everything_to_the_bit(method: str) -> None:
    k, *rest = drawn(5)
    q, m, v, w = rest
    k[1] = torch.nan
    before = [x.clone() for x in rest]
    options = {"method": method, "second_moment": "rotate"}
    failed = update_eigenbasis_and_momentum(k, q, m, v, 0, **options, eigenvalues=w)
    assert failed.tolist() == [False, True, False]
    for x, old in zip(rest, before, strict=True):
        assert torch.equal(x[1], old[1])
        assert not torch.equal(x[0], old[0])
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("is_raised", [True, False])
def test_eigh_that_fails_in_fp32_is_retried_in_fp64(
    is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.linalg.eigh

    def fails_in_fp32(k: Tensor) -> Any:
        found = real(k)
        if k.dtype == torch.float32:
            if is_raised:
                raise torch.linalg.LinAlgError("did not converge")
            found.eigenvectors.fill_(torch.nan)
        return found

    k = spd(3, 5).float()
    expected, _ = get_eigenbasis_eigh(k)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    found, failed = get_eigenbasis_eigh(k)
    assert not failed.any()
    assert found.dtype == torch.float32
    close(found.abs(), expected.abs(), 1e-5)


def test_one_bad_matrix_does_not_cost_the_others_their_basis() -> None:
    k, old = spd(3, 4), basis(3, 4, 9)
    k[1] = torch.nan
    q, failed = get_eigenbasis_eigh(k, old)
    assert failed.tolist() == [False, True, False]
    assert torch.equal(q[1], old[1])
    assert off_diagonal(k[::2], q[::2]) < 1e-12
    assert torch.equal(get_eigenbasis_eigh(k)[0][1], torch.eye(4, dtype=torch.float64))


def test_a_factor_of_zeros_has_the_identity_as_basis() -> None:
    q, failed = get_eigenbasis_eigh(torch.cat([0 * spd(1, 4), spd(1, 4)]))
    assert not failed.any()
    assert torch.equal(q[0], torch.eye(4, dtype=torch.float64))


def test_the_criterion_is_the_share_of_the_diagonal() -> None:
    """For [[1, x], [x, 1]] |diag| / |K| is 1 / sqrt(1 + x^2), about 1 - x^2 / 2."""
    k, q = torch.tensor([[[1.0, 0.1], [0.1, 1.0]]]).double(), torch.eye(2).double()[None]
    share = 1 - (1 + 0.1**2) ** -0.5
    assert is_still_diagonal(k, q, 1.01 * share).tolist() == [True]
    assert is_still_diagonal(k, q, 0.99 * share).tolist() == [False]
    turned, w = basis(1, 2), torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert is_still_diagonal((turned * w) @ turned.mT, turned, 1e-12).tolist() == [True]
