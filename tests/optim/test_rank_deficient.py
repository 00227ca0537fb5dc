"""Factors without full rank: `refresh_method="auto"` damps them, so that Cholesky-QR does not give up on them at every refresh."""

import pytest
import torch
from torch import Tensor

from lather.optim import SOAP
from lather.optim.linalg import eigenbasis

N, RANK = 96, 20


def gradients(num: int) -> list[Tensor]:
    """Of matrices whose gradients stay in a space of few dims."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(N, RANK, generator=generator)).Q for _ in range(2))
    return [left @ torch.randn(RANK, RANK, generator=generator) @ right.mT for _ in range(num)]


@pytest.fixture
def deficient() -> Tensor:
    """(1, n, n)."""
    g = torch.cat(gradients(3), dim=1)
    return (g @ g.mT)[None]


def test_after_the_first_refreshes_none_is_retried() -> None:
    counts = {}
    for method in ("auto", "cholesky_qr"):
        p = torch.nn.Parameter(torch.zeros(N, N))
        optimizer = SOAP([p], precondition_frequency=1, refresh_method=method)
        retried = []
        for g in gradients(20):
            p.grad = g
            optimizer.step()
            retried.append(optimizer.counters["refreshes_retried"])
        counts[method] = retried[-1] - retried[3]
    assert counts["auto"] == 0
    assert counts["cholesky_qr"] > 0


def test_a_damped_basis_is_as_good_as_qrs(deficient: Tensor) -> None:
    found = {}
    for method in ("auto", "qr"):
        q = eigenbasis.get_eigenbasis_eigh(deficient + 0.01 * deficient.mean() * torch.eye(N))[0]
        for _ in range(6):
            q, _ = eigenbasis.get_eigenbasis_qr(deficient, q, method=method)
        rotated = q.mT @ deficient @ q
        diagonal = rotated.diagonal(dim1=1, dim2=2)
        found[method] = (rotated - torch.diag_embed(diagonal)).norm() / rotated.norm()
        torch.testing.assert_close(q.mT @ q, torch.eye(N)[None], rtol=0, atol=1e-5)
        assert bool((diagonal[:, : RANK - 1] >= diagonal[:, 1:RANK] - 1e-4 * diagonal.amax()).all())
    assert found["auto"] <= 1.5 * found["qr"] + 1e-5


def test_factors_of_full_rank_keep_their_bits(deficient: Tensor) -> None:
    """Also in the company of one that is damped."""
    x = torch.randn(1, N, 3 * N, generator=torch.Generator().manual_seed(1))
    full = x @ x.mT
    q = eigenbasis.get_eigenbasis_eigh(full + 0.3 * full.diagonal(dim1=1, dim2=2).diag_embed())[0]
    alone, _ = eigenbasis.get_eigenbasis_qr(full, q, method="auto")
    plain, _ = eigenbasis.get_eigenbasis_qr(full, q, method="cholesky_qr")
    together, _ = eigenbasis.get_eigenbasis_qr(torch.cat([full, deficient]), torch.cat([q, q]), method="auto")
    assert torch.equal(alone, plain)
    assert torch.equal(together[:1], alone)


def test_power_iterations_are_damped_each() -> None:
    p = torch.nn.Parameter(torch.zeros(N, N))
    optimizer = SOAP([p], precondition_frequency=1, power_iter_steps=3)
    for g in gradients(12):
        p.grad = g
        optimizer.step()
    before = optimizer.counters["refreshes_retried"]
    for g in gradients(6):
        p.grad = g
        optimizer.step()
    assert optimizer.counters["refreshes_retried"] == before
