"""Factors without full rank, on which Cholesky-QR fails: `refresh_method="auto"` does not use it
there, and "root_qr" can do them."""

import pytest
import torch
from torch import Tensor

from lather.optim import SOAP
from lather.optim.linalg import eigenbasis

N, RANK = 96, 20


def gradients(num: int) -> list[Tensor]:
    """Draw gradients of matrices that stay in a space of few dims."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(N, RANK, generator=generator)).Q for _ in range(2))
    return [left @ torch.randn(RANK, RANK, generator=generator) @ right.mT for _ in range(num)]


@pytest.fixture
def deficient() -> Tensor:
    """A factor (1, n, n) of few dims."""
    g = torch.cat(gradients(3), dim=1)
    return (g @ g.mT)[None]


def test_none_is_retried() -> None:
    counts = {}
    for method in ("auto", "root_qr", "cholesky_qr"):
        p = torch.nn.Parameter(torch.zeros(N, N))
        optimizer = SOAP([p], precondition_frequency=1, refresh_method=method)
        retried = []
        for g in gradients(20):
            p.grad = g
            optimizer.step()
            retried.append(optimizer.counters["refreshes_retried"])
        counts[method] = retried[-1] - (retried[3] if method == "cholesky_qr" else 0)
    assert counts["auto"] == counts["root_qr"] == 0
    assert counts["cholesky_qr"] > 0


def test_the_roots_basis_is_as_good_as_qrs(deficient: Tensor) -> None:
    found = {}
    for method in ("root_qr", "qr"):
        q = eigenbasis.get_eigenbasis_eigh(deficient + 0.01 * deficient.mean() * torch.eye(N))[0]
        for _ in range(6):
            q, _ = eigenbasis.get_eigenbasis_qr(deficient, q, method=method)
        rotated = q.mT @ deficient @ q
        diagonal = rotated.diagonal(dim1=1, dim2=2)
        found[method] = (rotated - torch.diag_embed(diagonal)).norm() / rotated.norm()
        torch.testing.assert_close(q.mT @ q, torch.eye(N)[None], rtol=0, atol=1e-5)
        assert bool((diagonal[:, : RANK - 1] >= diagonal[:, 1:RANK] - 1e-4 * diagonal.amax()).all())
    assert found["root_qr"] <= 1.5 * found["qr"] + 1e-5


def test_each_matrix_goes_its_own_way_whatever_the_company(deficient: Tensor) -> None:
    x = torch.randn(1, N, 3 * N, generator=torch.Generator().manual_seed(1))
    full = x @ x.mT
    q = eigenbasis.get_eigenbasis_eigh(full + 0.3 * full.diagonal(dim1=1, dim2=2).diag_embed())[0]
    k = torch.cat([full, deficient, full])
    together, order, failed = eigenbasis.iterate(k, q.expand(3, N, N), 1, "auto")
    assert not failed.any()
    for i, method in enumerate(("cholesky_qr", "qr", "cholesky_qr")):
        for way in (method, "auto"):
            alone = eigenbasis.iterate(k[i : i + 1], q, 1, way)
            assert torch.equal(together[i], alone[0][0])
            assert torch.equal(order[i], alone[1][0])


@pytest.mark.parametrize("method", ["auto", "root_qr"])
def test_power_iterations_do_not_fail_either(method: str) -> None:
    p = torch.nn.Parameter(torch.zeros(N, N))
    optimizer = SOAP([p], precondition_frequency=1, power_iter_steps=3, refresh_method=method)
    for g in gradients(12):
        p.grad = g
        optimizer.step()
    assert optimizer.counters["refreshes_retried"] == 0
