"""Cholesky-QR is orthonormal and equal to QR up to signs, or it is flagged as failed; it is never
silently wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lather.optim.functional import get_eigenbasis_qr, update_eigenbasis_and_momentum
from lather.optim.linalg import orthogonal
from lather.optim.linalg.eigenbasis import iterate
from lather.optim.linalg.orthogonal import block_rows, orthonormal_rows, pick_refresh_method
from lather.standin.operations import flops, name_of

SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 100]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
BATCH = 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(BATCH, n, n, seed=100 + seed)).Q


def of_spectrum(w: Tensor, n: int) -> Tensor:
    """Make Q_0^T K, the rows of one step of orthogonal iteration, where K has eigenvalues w and Q_0
    is as good as random."""
    u = basis(n, 1)
    return basis(n, 2).mT @ ((u * w) @ u.mT)


def clustered(n: int) -> Tensor:
    w = torch.ones(n, dtype=torch.float64)
    w[: n // 2] = 1e3
    return of_spectrum(w * (1 + 1e-6 * randn(n).abs()), n)


def rank_deficient(n: int, rank: int) -> Tensor:
    return of_spectrum((torch.arange(n) < rank).double(), n)


KINDS = {
    "gaussian": lambda n: randn(BATCH, n, n),
    "diagonal": lambda n: (
        torch.eye(n, dtype=torch.float64).expand(BATCH, n, n)
        * torch.logspace(0, -6, n, dtype=torch.float64)
    ),
    "wide_spectrum": lambda n: of_spectrum(torch.logspace(0, -5, n, dtype=torch.float64), n),
    "gaussian_factor": lambda n: basis(n).mT @ (randn(BATCH, n, n) @ randn(BATCH, n, n).mT),
    "clustered": clustered,
    "half_rank": lambda n: rank_deficient(n, n // 2),
    "rank_one_less": lambda n: rank_deficient(n, n - 1),
    "equal_rows": lambda n: randn(BATCH, 1, n).expand(BATCH, n, n),
    "zero": lambda n: torch.zeros(BATCH, n, n, dtype=torch.float64),
}


def error(q: Tensor) -> Tensor:
    """The distance from orthonormal of each matrix."""
    return (q @ q.mT - torch.eye(q.shape[-1], dtype=q.dtype)).abs().amax((1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cholesky_qr_is_orthonormal_or_flagged(kind: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        for scale in (1.0, 1e-20, 1e15):
            y = (KINDS[kind](n) * scale).to(dtype)
            q, failed = orthonormal_rows(y.clone(), "cholesky_qr")
            worst = error(q).nan_to_num(nan=torch.inf)
            assert bool((failed | (worst <= TOLERANCE[dtype])).all()), (
                n,
                scale,
                worst.tolist(),
                failed.tolist(),
            )
            assert bool((error(orthonormal_rows(y, "qr")[0]) <= TOLERANCE[dtype]).all())


@pytest.mark.parametrize("n", SIZES)
def test_cholesky_qr_is_qr_up_to_signs_and_does_not_fail_where_it_need_not(n: int) -> None:
    y = torch.eye(n, dtype=torch.float64) + 0.3 / n**0.5 * randn(BATCH, n, n)
    scales = torch.logspace(0, -12, n, dtype=torch.float64)[:, None]
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
    q_new, order = get_eigenbasis_qr(k, q, method="cholesky_qr")
    by_qr, order_by_qr = get_eigenbasis_qr(k, q, method="qr")
    ordered = torch.stack([one[:, columns] for one, columns in zip(q, order, strict=True)])
    by_cholesky, failed = orthonormal_rows((k @ ordered).mT.contiguous(), "cholesky_qr")
    assert failed.tolist() == [False, True, False]
    assert torch.equal(order, order_by_qr)
    assert torch.equal(q_new[1], by_qr[1])
    torch.testing.assert_close(q_new[::2], by_cholesky.mT[::2], rtol=0, atol=1e-5)
    assert error(q_new).max() <= 1e-5


@pytest.mark.parametrize("method", ["qr", "cholesky_qr", "auto"])
@pytest.mark.parametrize("kind", ["gaussian_factor", "clustered", "half_rank", "zero"])
def test_every_eigenbasis_is_orthonormal(kind: str, method: str) -> None:
    for n in (1, 2, 33, 64, 65):
        x = {
            "gaussian_factor": randn(BATCH, n, n),
            "clustered": clustered(n),
            "half_rank": rank_deficient(n, n // 2),
        }.get(kind)
        k = torch.zeros(BATCH, n, n) if x is None else (x @ x.mT).float()
        q_new, order = get_eigenbasis_qr(k, basis(n).float(), power_iter_steps=2, method=method)
        assert error(q_new).max() <= 1e-5, n
        assert torch.equal(order.sort(-1).values, torch.arange(n).expand(BATCH, n))


def test_auto_depends_on_size_and_kind_of_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [pick_refresh_method(n, cpu) for n in (8, 64, 10**5)] == ["qr", "cholesky_qr", "qr"]
    assert [pick_refresh_method(n, gpu) for n in (8, 4096, 10**5)] == ["root_qr", "root_qr", "qr"]


def test_auto_takes_qr_for_the_matrices_on_which_cholesky_qr_would_fail() -> None:
    """One batch alternates between bases near those of a flat spectrum and of one whose least
    eigenvalues are rounding errors."""
    n = 64
    easy, hard = torch.linspace(2, 1, n).double(), torch.logspace(0, -12, n).double()
    u = basis(n, 1)[:1]
    k = torch.cat([(u * (easy if number % 2 else hard)) @ u.mT for number in range(4)]).float()
    q = torch.linalg.qr(u + 1e-3 * randn(1, n, n)).Q.float().expand(4, n, n).contiguous()
    found, order, failed = iterate(k, q, 2, "auto")
    assert not failed.any()
    assert iterate(k, q, 2, "cholesky_qr")[2].tolist() == [True, False] * 2
    for number in range(4):
        alone, order_alone, _ = iterate(
            k[number : number + 1], q[number : number + 1], 2, "cholesky_qr" if number % 2 else "qr"
        )
        torch.testing.assert_close(found[number], alone[0], rtol=0, atol=1e-6)
        assert torch.equal(order[number], order_alone[0])


# --- the root -------------------------------------------------------------------------------------

SPECTRA = {
    "flat": lambda i, n: torch.ones(n),
    "harmonic": lambda i, n: 1 / i,
    "steep": lambda i, n: i**-4,
    "wide": lambda i, n: torch.logspace(0, -7, n, dtype=torch.float64),
    "clustered": lambda i, n: torch.where(i < n // 2, 1e3, 1.0),
    "few": lambda i, n: (i <= 4).double(),
    "tenth": lambda i, n: (i <= n // 10 + 1).double(),
    "one_less": lambda i, n: (i < n).double(),
}


@pytest.fixture(params=["narrow", "wide"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the blocks of a CPU, and those of a GPU at a sixteenth of their size."""
    if request.param == "wide":
        gpu = torch.device("cuda")
        monkeypatch.setattr(
            orthogonal, "block_rows", lambda n, device: block_rows(16 * n, gpu) // 16
        )


def off_diagonal(k: Tensor, q: Tensor) -> Tensor:
    rotated = q.double().mT @ k.double() @ q.double()
    diagonal = torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
    return torch.linalg.matrix_norm(rotated - diagonal) / torch.linalg.matrix_norm(
        rotated
    ).clamp_min(1e-30)


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
            assert bool(
                (failed | (error(found.mT.double()).nan_to_num(nan=torch.inf) <= 1e-5)).all()
            ), n
            assert torch.equal(order, order_by_qr)
            if q is near:
                assert bool(
                    (
                        failed
                        | (
                            off_diagonal(k, found.nan_to_num())
                            <= 1.02 * off_diagonal(k, by_qr) + 1e-4
                        )
                    ).all()
                ), n


@pytest.mark.usefixtures("blocks")
def test_the_root_finds_what_qr_finds() -> None:
    n = 100
    u = basis(n, 1)
    k = (u * torch.linspace(2, 1, n, dtype=torch.float64)) @ u.mT
    for steps in (1, 3):
        found, _, _ = iterate(k, basis(n, 2), steps, "root_qr")
        expected, _, _ = iterate(k, basis(n, 2), steps, "qr")
        torch.testing.assert_close(
            (found * expected).sum(-2).abs(),
            torch.ones(BATCH, n, dtype=torch.float64),
            rtol=0,
            atol=1e-10,
        )


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
    k = torch.empty(2, n, n, device="meta")
    for method, most in (("root_qr", (115, 203)), ("cholesky_qr", (82, 138))):
        with Launches() as launches:
            iterate(k, k, 1, method)
        assert 20 < launches.num <= most[n > 2048]
        assert launches.rows <= 512
    assert block_rows(n, torch.device("cuda")) * 8 >= n
    with Launches() as launches:
        update_eigenbasis_and_momentum(
            k, k.clone(), k[:, :, :8].clone(), k[:, :, :8].clone(), 0, second_moment="rotate"
        )
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
