"""Cholesky-QR is orthonormal and equal to QR up to signs, or it is flagged as failed; it is never
silently wrong. Factors without full rank, on which it fails, have other methods."""

from typing import Any

import pytest
import torch
from optim_helpers import Run, parameter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lather.optim import SOAP
from lather.optim.functional import get_eigenbasis_qr, update_eigenbasis_and_momentum
from lather.optim.linalg import orthogonal
from lather.optim.linalg.eigenbasis import get_eigenbasis_eigh, iterate
from lather.optim.linalg.orthogonal import block_rows, orthonormal_rows, pick_refresh_method
from lather.standin.operations import flops, name_of

SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 100]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
BATCH = 4
FP64 = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def basis(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(BATCH, n, n, seed=100 + seed)).Q


def of_spectrum(w: Tensor, n: int) -> Tensor:
    """Make Q_0^T K, the rows of one step of orthogonal iteration, where K has eigenvalues w and Q_0
    is as good as random."""
    u = basis(n, 1)
    return basis(n, 2).mT @ ((u * w) @ u.mT)


def clustered(n: int) -> Tensor:
    w = torch.where(torch.arange(n) < n // 2, 1e3, 1.0).double()
    return of_spectrum(w * (1 + 1e-6 * randn(n).abs()), n)


def of_rank(n: int, rank: int) -> Tensor:
    return of_spectrum((torch.arange(n) < rank).double(), n)


KINDS = {
    "gaussian": lambda n: randn(BATCH, n, n),
    "diagonal": lambda n: torch.eye(n).expand(BATCH, n, n) * torch.logspace(0, -6, n, dtype=FP64),
    "wide_spectrum": lambda n: of_spectrum(torch.logspace(0, -5, n, dtype=FP64), n),
    "gaussian_factor": lambda n: basis(n).mT @ (randn(BATCH, n, n) @ randn(BATCH, n, n).mT),
    "clustered": clustered,
    "half_rank": lambda n: of_rank(n, n // 2),
    "rank_one_less": lambda n: of_rank(n, n - 1),
    "equal_rows": lambda n: randn(BATCH, 1, n).expand(BATCH, n, n),
    "zero": lambda n: torch.zeros(BATCH, n, n, dtype=FP64),
}


def error(q: Tensor) -> Tensor:
    """The distance from orthonormal of each matrix; infinite if it is not finite."""
    distance = (q @ q.mT - torch.eye(q.shape[-1], dtype=q.dtype)).abs().amax((1, 2))
    return distance.nan_to_num(nan=torch.inf)


def off_diagonal(k: Tensor, q: Tensor) -> Tensor:
    rotated = q.double().mT @ k.double() @ q.double()
    diagonal = torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
    size = torch.linalg.matrix_norm(rotated).clamp_min(1e-30)
    return torch.linalg.matrix_norm(rotated - diagonal) / size


@pytest.mark.parametrize("dtype", [torch.float32, FP64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cholesky_qr_is_orthonormal_or_flagged(kind: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        for scale in (1.0, 1e-20, 1e15):
            y = (KINDS[kind](n) * scale).to(dtype)
            q, failed = orthonormal_rows(y.clone(), "cholesky_qr")
            assert bool((failed | (error(q) <= TOLERANCE[dtype])).all()), (n, scale)
            assert bool((error(orthonormal_rows(y, "qr")[0]) <= TOLERANCE[dtype]).all())


@pytest.mark.parametrize("n", SIZES)
def test_cholesky_qr_is_qr_up_to_signs_and_does_not_fail_where_it_need_not(n: int) -> None:
    y = torch.eye(n, dtype=FP64) + 0.3 / n**0.5 * randn(BATCH, n, n)
    scales = torch.logspace(0, -12, n, dtype=FP64)[:, None]
    for rows in (y, y * scales):  # rows of any scale are equally hard
        q, failed = orthonormal_rows(rows.clone(), "cholesky_qr")
        expected, _ = orthonormal_rows(rows.clone(), "qr")
        assert not failed.any()
        signs = (q * expected).sum(-1, keepdim=True).sign()
        torch.testing.assert_close(q, signs * expected, rtol=0, atol=1e-12)
        lower = rows @ q.mT
        torch.testing.assert_close(lower, lower.tril(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_what_is_not_finite_is_flagged_and_the_others_are_not_touched_by_it(
    n: int, value: float
) -> None:
    y = (torch.eye(n) + 0.1 / n**0.5 * randn(3, n, n)).float()
    alone = torch.cat([orthonormal_rows(y[i : i + 1].clone(), "cholesky_qr")[0] for i in range(3)])
    y[1, n // 2, 1] = value
    q, failed = orthonormal_rows(y.clone(), "cholesky_qr")
    assert failed.tolist() == [False, True, False]
    torch.testing.assert_close(q[::2], alone[::2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [8, 33, 64, 65])
def test_the_eigenbasis_falls_back_to_qr_for_exactly_the_matrices_that_fail(n: int) -> None:
    q = basis(n)[:3].float()
    good = (q * torch.linspace(2, 1, n)) @ q.mT
    k = torch.stack([good[0], torch.zeros(n, n), good[2]])
    found, order = get_eigenbasis_qr(k, q, method="cholesky_qr")
    by_qr, order_by_qr = get_eigenbasis_qr(k, q, method="qr")
    by_cholesky, _, failed = iterate(k, q, 1, "cholesky_qr")
    assert failed.tolist() == [False, True, False]
    assert torch.equal(order, order_by_qr)
    assert torch.equal(found[1], by_qr[1])
    torch.testing.assert_close(found[::2], by_cholesky[::2], rtol=0, atol=1e-5)
    assert error(found).max() <= 1e-5


@pytest.mark.parametrize("method", ["qr", "cholesky_qr", "auto"])
@pytest.mark.parametrize("kind", ["gaussian", "clustered", "half_rank", "zero"])
def test_every_eigenbasis_is_orthonormal(kind: str, method: str) -> None:
    for n in (1, 2, 33, 64, 65):
        x = KINDS[kind](n)
        k = (x @ x.mT).float()
        q, order = get_eigenbasis_qr(k, basis(n).float(), power_iter_steps=2, method=method)
        assert error(q).max() <= 1e-5, n
        assert torch.equal(order.sort(-1).values, torch.arange(n).expand(BATCH, n))


def test_auto_depends_on_size_and_kind_of_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [pick_refresh_method(n, cpu) for n in (8, 64, 10**5)] == ["qr", "cholesky_qr", "qr"]
    assert [pick_refresh_method(n, gpu) for n in (8, 4096, 10**5)] == ["root_qr", "root_qr", "qr"]


# --- factors without full rank --------------------------------------------------------------------

N, RANK = 96, 20


def gradients(num: int, rank: int = RANK) -> list[Tensor]:
    """Draw gradients of matrices that stay in a space of few dims."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(N, rank, generator=generator)).Q for _ in range(2))
    return [left @ torch.randn(rank, rank, generator=generator) @ right.mT for _ in range(num)]


@pytest.fixture
def deficient() -> Tensor:
    """A factor (1, n, n) of few dims."""
    g = torch.cat(gradients(3), dim=1)
    return (g @ g.mT)[None]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("method", ["auto", "root_qr", "cholesky_qr"])
def test_only_cholesky_qr_alone_is_retried(method: str, steps: int) -> None:
    options: Any = {"refresh_method": method, "power_iter_steps": steps}
    p = parameter(N, N)
    a = Run(SOAP([p], precondition_frequency=1, **options), [p])
    for g in gradients(12, rank=1):
        p.grad = g
        a.optimizer.step()
    assert (a.optimizer.counters["refreshes_retried"] > 0) == (method == "cholesky_qr")


def test_the_roots_basis_is_as_good_as_qrs(deficient: Tensor) -> None:
    left = {}
    for method in ("root_qr", "qr"):
        q = get_eigenbasis_eigh(deficient + 0.01 * deficient.mean() * torch.eye(N))[0]
        for _ in range(6):
            q, _ = get_eigenbasis_qr(deficient, q, method=method)
        w = (q.mT @ deficient @ q).diagonal(dim1=1, dim2=2)
        left[method] = off_diagonal(deficient, q)
        assert error(q).max() <= 1e-5
        assert bool((w[:, : RANK - 1] >= w[:, 1:RANK] - 1e-4 * w.amax()).all())
    assert left["root_qr"] <= 1.5 * left["qr"] + 1e-5


def test_each_matrix_goes_its_own_way_whatever_the_company(deficient: Tensor) -> None:
    """By "auto", a batch takes QR where Cholesky-QR would fail."""
    x = randn(1, N, 3 * N, seed=1).float()
    full = x @ x.mT
    q = get_eigenbasis_eigh(full + 0.3 * full.diagonal(dim1=1, dim2=2).diag_embed())[0]
    k = torch.cat([full, deficient, full])
    together, order, failed = iterate(k, q.expand(3, N, N), 1, "auto")
    assert not failed.any()
    for i, method in enumerate(("cholesky_qr", "qr", "cholesky_qr")):
        for way in (method, "auto"):
            alone = iterate(k[i : i + 1], q, 1, way)
            assert torch.equal(together[i], alone[0][0])
            assert torch.equal(order[i], alone[1][0])


# --- the root -------------------------------------------------------------------------------------

SPECTRA = {
    "flat": lambda i, n: torch.ones(n),
    "harmonic": lambda i, n: 1 / i,
    "steep": lambda i, n: i**-4,
    "wide": lambda i, n: torch.logspace(0, -7, n, dtype=FP64),
    "clustered": lambda i, n: torch.where(i < n // 2, 1e3, 1.0),
    "few": lambda i, n: i <= 4,
    "tenth": lambda i, n: i <= n // 10 + 1,
    "one_less": lambda i, n: i < n,
}


@pytest.fixture(params=["narrow", "wide"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the blocks of a CPU, and those of a GPU at a sixteenth of their size."""
    if request.param == "wide":
        gpu = torch.device("cuda")
        rows = lambda n, device: block_rows(16 * n, gpu) // 16  # noqa: E731
        monkeypatch.setattr(orthogonal, "block_rows", rows)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("scale", [1.0, 1e-16, 1e12], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_root_is_as_good_as_qr_and_fails_at_most_on_few_equal_eigenvalues(
    spectrum: str, scale: float
) -> None:
    for n in (1, 2, 15, 16, 33, 100, 161):
        w = scale * SPECTRA[spectrum](torch.arange(1, n + 1).double(), n).double()
        u = basis(n, 1)
        k = ((u * w) @ u.mT).float()
        near = torch.linalg.qr(u + 0.05 / n**0.5 * randn(BATCH, n, n)).Q.float()
        for q in (near, basis(n, 2).float()):
            found, order, failed = iterate(k, q, 1, "root_qr")
            by_qr, order_by_qr, _ = iterate(k, q, 1, "qr")
            assert spectrum == "few" or not failed.any(), n
            assert bool((failed | (error(found.mT.double()) <= 1e-5)).all()), n
            assert torch.equal(order, order_by_qr)
            if q is near:
                limit = 1.02 * off_diagonal(k, by_qr) + 1e-4
                assert bool((failed | (off_diagonal(k, found.nan_to_num()) <= limit)).all()), n


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("steps", [1, 3])
def test_the_root_finds_what_qr_finds(steps: int) -> None:
    n = 100
    u = basis(n, 1)
    k = (u * torch.linspace(2, 1, n, dtype=FP64)) @ u.mT
    found, expected = (iterate(k, basis(n, 2), steps, method)[0] for method in ("root_qr", "qr"))
    cosines = (found * expected).sum(-2).abs()
    torch.testing.assert_close(cosines, torch.ones(BATCH, n, dtype=FP64), rtol=0, atol=1e-10)


def test_what_is_zero_keeps_its_basis_and_what_is_not_finite_fails() -> None:
    k, q = torch.zeros(3, 40, 40), basis(40).float()[:3]
    k[1, 3, 5] = torch.nan
    k[2] = torch.eye(40)
    found, _, failed = iterate(k, q, 1, "root_qr")
    assert failed.tolist() == [False, True, False]
    torch.testing.assert_close((found[0] * q[0]).sum(-2).abs(), torch.ones(40))


# --- launches and flops ---------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operators that are called, without views and fresh memory, their flops, and the
    rows of the matrices that are factorized or inverted."""

    num = flops = rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), name_of(func)
        self.num += not (func.is_view or name.startswith(("empty", "_unsafe_view", "detach")))
        self.flops += flops(func, name, args, kwargs or {}, out)
        if name in ("linalg_cholesky_ex", "linalg_solve_triangular"):
            self.rows = max(self.rows, args[0].shape[-1])
        return out


@pytest.mark.parametrize("n", [64, 1024, 1408, 2048, 2052, 2816, 4096])
def test_a_refresh_on_a_gpu_is_few_launches_of_products(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "is_gpu", lambda on: True)
    k, m = torch.empty(2, n, n, device="meta"), torch.empty(2, n, 8, device="meta")
    for method, most in (("root_qr", (115, 203)), ("cholesky_qr", (82, 138))):
        with Launches() as launches:
            iterate(k, k, 1, method)
        assert 20 < launches.num <= most[n > 2048]
        assert launches.rows <= 512
    assert block_rows(n, torch.device("cuda")) * 8 >= n
    with Launches() as launches:
        update_eigenbasis_and_momentum(k, k.clone(), m, m.clone(), 0, second_moment="rotate")
    assert launches.num <= (130, 220)[n > 2048]


@pytest.mark.parametrize(
    ("device", "n"),
    [*(("cpu", n) for n in (100, 200, 1408)), *(("cuda", n) for n in (1024, 1408, 2816, 4096))],
)
def test_flops_are_those_that_the_module_states(
    device: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "is_gpu", lambda on: device == "cuda")
    k = torch.empty(2, n, n, device="meta")
    num_blocks = n / block_rows(n, torch.device(device))
    for method, in_general, by_blocks in (("cholesky_qr", 4, 4), ("root_qr", 19 / 3, 7)):
        with Launches() as launches:
            iterate(k, k, 1, method)
        cubes = launches.flops / (2 * n**3) - 2  # without K Q
        stated = in_general + by_blocks / num_blocks + 3 / num_blocks**2
        assert cubes == pytest.approx(stated, rel=0.03)
