"""Split products, and refreshes by them: the tensor cores of a GPU are emulated, at an eighth of
the sizes. Refreshes are orthonormal and find the bases of true fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_helpers import Run, parameter
from tensor_cores import TensorCores
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from in_turn import in_turn
from lather.optim import KLSOAP, SOAP, MatrixOptimizer
from lather.optim.functional import get_eigenbasis_qr, update_eigenbasis_and_momentum
from lather.optim.linalg import orthogonal, split_products
from lather.optim.linalg.eigenbasis import iterate
from lather.optim.linalg.orthogonal import block_rows
from lather.optim.linalg.split_products import (
    SPLIT_ERROR,
    SplitMatrix,
    add_product_,
    is_split,
    operand,
    split_product,
)
from lather.torch_private import set_fp32_precision

FP64 = torch.float64
SMALLER = 8
MOST = 5e-6
"""The most that Q^T Q may differ from the identity here: half of what it may on a GPU."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def product(a: Tensor, b: Tensor) -> Tensor:
    return split_product(operand(a, split=True), operand(b, split=True))


# --- the product ----------------------------------------------------------------------------------


def test_the_error_is_as_stated() -> None:
    a, b = randn(1, 512, 512).float(), randn(1, 512, 512, seed=1).float()
    with TensorCores(truncated=True) as cores:
        found = product(a, b).double()
    assert cores.num_products == 3
    expected = a.double() @ b.double()
    error = float((found - expected).norm() / expected.norm())
    assert 0.5 * SPLIT_ERROR < error < SPLIT_ERROR
    assert bool(((found - expected).abs() <= 3.1 * 2**-16 * (a.abs() @ b.abs())).all())


@pytest.mark.parametrize("scale", [1e-25, 1e-15, 1e15])
def test_no_scale_is_out_of_range(scale: float) -> None:
    a, b = randn(2, 40, 24), randn(2, 24, 32, seed=1)
    with TensorCores():
        found = product((a * scale).float(), (b / scale).float())
    torch.testing.assert_close(found, (a @ b).float(), rtol=0, atol=4e-4)


def test_views_products_of_the_transposed_and_sums() -> None:
    a, b = randn(2, 40, 24).float(), randn(2, 40, 32, seed=1).float()
    parts, total = operand(a, split=True), torch.ones(2, 8, 32)
    assert isinstance(parts, SplitMatrix)
    with TensorCores():
        add_product_(total, parts[:, :, 8:16].mT, operand(b, split=True), alpha=-1)
    torch.testing.assert_close(total, 1 - a[:, :, 8:16].mT @ b, rtol=0, atol=4e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_what_is_not_finite_stays_so_and_in_its_matrix(value: float) -> None:
    a, b = randn(2, 16, 16).float(), randn(2, 16, 16, seed=1).float()
    a[1, 3, 5] = value
    with TensorCores():
        found = product(a, b)
    assert bool(found[0].isfinite().all())
    assert bool((found[1].isfinite() == (a[1] @ b[1]).isfinite()).all())


def test_only_large_aligned_matrices_on_a_gpu_in_true_fp32_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def like(n: int, dtype: torch.dtype = torch.float32) -> bool:
        return is_split(torch.empty(1, n, n, dtype=dtype, device="meta"))

    assert not like(1024)
    monkeypatch.setattr(split_products, "has_wide_products", lambda on: True)
    assert [like(n) for n in (256, 512, 516, 520)] == [False, True, False, True]
    assert not like(1024, FP64)
    set_fp32_precision("cuda", "matmul", "tf32")
    try:
        assert not like(1024)
    finally:
        set_fp32_precision("cuda", "matmul", "none")
    assert like(1024)


# --- the refresh ----------------------------------------------------------------------------------


@pytest.fixture
def split_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Refresh as a GPU does matrices of eight times the size."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        orthogonal, "block_rows", lambda n, on: block_rows(SMALLER * n, gpu) // SMALLER
    )
    monkeypatch.setattr(split_products, "LEAST_SIZE", 512 // SMALLER)
    monkeypatch.setattr(split_products, "has_wide_products", lambda on: True)
    with TensorCores():
        yield monkeypatch


def rotation(n: int, size: int, seed: int) -> Tensor:
    """Make an orthogonal matrix (1, n, n) of blocks on the diagonal."""
    blocks = torch.linalg.qr(randn(n // size, size, size, seed=seed)).Q
    return torch.block_diag(*blocks)[None]


SPECTRA = {
    "flat": lambda i, n: torch.ones(n),
    "harmonic": lambda i, n: 1 / i,
    "steep": lambda i, n: i**-4,
    "wide": lambda i, n: torch.logspace(0, -8, n, dtype=FP64),
    "clustered": lambda i, n: torch.where(i <= n // 2, 1e3, 1.0),
    "tenth": lambda i, n: i <= n // 10 + 1,
    "half": lambda i, n: i <= n // 2,
    "one_less": lambda i, n: i < n,
    "zero": lambda i, n: torch.zeros(n),
}


def factor(spectrum: str, u: Tensor, scale: float = 1.0) -> Tensor:
    """Make a factor whose eigenvectors are the columns of `u`, in any order."""
    n = u.shape[-1]
    w = SPECTRA[spectrum](torch.arange(1, n + 1).double(), n).double()
    w = w[torch.randperm(n, generator=torch.Generator().manual_seed(n))]
    return ((u * (scale * w)) @ u.mT).float()


def bases(n: int, size: int) -> tuple[Tensor, list[Tensor]]:
    """Return eigenvectors, and bases a few percent from them, anywhere, and of the coordinates."""
    u = rotation(n, size, 1)
    near = torch.linalg.qr(u + 0.05 * size**-0.5 * rotation(n, size, 2)).Q
    return u, [near.float(), rotation(n, size, 3).float(), torch.eye(n)[None]]


def off_orthonormal(q: Tensor) -> float:
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[-1])).abs().max())


SIZES = (2, 8, 0)
"""Sizes of the blocks of a matrix: pairs, eights, and dense."""


def off_diagonal(k: Tensor, q: Tensor) -> float:
    rotated = q.double().mT @ k.double() @ q.double()
    rest = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
    return float(rest.norm() / rotated.norm().clamp_min(1e-30))


@pytest.mark.usefixtures("split_on_cpu")
@pytest.mark.parametrize(("spectrum", "size"), in_turn(SPECTRA, SIZES))
def test_refreshes_are_orthonormal_and_as_diagonal_as_by_qr(spectrum: str, size: int) -> None:
    """Also where eigenvectors have few elements, whose errors do not average."""
    for n in (64, 136, 256):
        u, starts = bases(n, size or n)
        for scale in (1.0, 1e-20, 1e15) if n == 64 else (1.0,):
            k = factor(spectrum, u, scale)
            for q in starts:
                found, order, failed = iterate(k, q, 1, "root_qr")
                assert not failed.any(), n
                assert off_orthonormal(found) <= MOST, n
                assert torch.equal(order.sort(-1).values, torch.arange(n)[None])
            found, _, _ = iterate(k, starts[0], 1, "root_qr")
            by_qr, _, _ = iterate(k, starts[0], 1, "qr")
            assert off_diagonal(k, found) <= 1.02 * off_diagonal(k, by_qr) + 1e-4, n


def test_the_basis_is_that_of_true_fp32_as_with_gradients_in_bf16(
    split_on_cpu: pytest.MonkeyPatch,
) -> None:
    """The basis changes no more than if the gradient, from which K is made, is rounded to bf16:
    much less where eigenvalues are above the lift, and as much below it."""
    n = 256
    u, (q, *_) = bases(n, n)
    for spectrum in ("harmonic", "steep", "wide"):
        w = SPECTRA[spectrum](torch.arange(1, n + 1).double(), n).double()
        g = (u * w.sqrt()) @ rotation(n, n, 7)
        k, other = (x @ x.mT for x in (g, g.bfloat16().double()))
        found, _, _ = iterate(k.float(), q, 2, "root_qr")
        with split_on_cpu.context() as plain:
            plain.setattr(split_products, "has_wide_products", lambda on: False)
            expected, _, _ = iterate(k.float(), q, 2, "root_qr")
            rerun, _, _ = iterate(other.float(), q, 2, "root_qr")
        ours, theirs = (
            1 - (x.double() * expected.double()).sum(-2).abs()[0] for x in (found, rerun)
        )
        for top in (n // 8, n // 2, n):
            limit = 1.5 * float(theirs[:top].mean()) + 1e-6
            assert float(ours[:top].mean()) <= limit, (spectrum, top)


@pytest.mark.usefixtures("split_on_cpu")
def test_four_equal_eigenvalues_may_fail_and_are_refreshed_by_qr() -> None:
    n = 256
    u = rotation(n, 4, 1)
    k = ((u * (torch.arange(n) < 4)) @ u.mT).float()
    q, _ = get_eigenbasis_qr(k, rotation(n, 4, 3).float(), method="root_qr")
    assert off_orthonormal(q) <= MOST


@pytest.mark.usefixtures("split_on_cpu")
def test_what_is_not_finite_fails_and_keeps_its_basis() -> None:
    n = 64
    u, (near, *_) = bases(n, n)
    k = factor("harmonic", u).repeat(3, 1, 1)
    k[1, 3, 5], k[2, 7, 7] = torch.nan, torch.inf
    q = near.repeat(3, 1, 1)
    m, v = randn(3, n, 4).float(), randn(3, n, 4, seed=1).float().square()
    failed = update_eigenbasis_and_momentum(k, q, m, v, 0, method="root_qr")
    assert failed.tolist() == [False, True, True]
    assert torch.equal(q[1:], near.repeat(2, 1, 1))
    assert off_orthonormal(q[:1]) <= MOST
    assert bool(m.isfinite().all() & v.isfinite().all())


@pytest.mark.usefixtures("split_on_cpu")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("with_momentum", [True, False])
def test_second_moments_are_rotated_element_by_element(dim: int, with_momentum: bool) -> None:
    n, spread = 64, torch.logspace(0, -10, 64, dtype=FP64)
    u, (q, *_) = bases(n, n)
    k, before = factor("harmonic", u), q.clone()
    v = randn(1, n, 40, seed=1).square() * spread[:, None]
    v = (v if dim == 0 else v.mT).float()
    m = randn(*v.shape, seed=2).float() if with_momentum else None
    square, momentum = v.double(), None if m is None else m.double()
    options: Any = {"method": "root_qr", "second_moment": "rotate"}
    update_eigenbasis_and_momentum(k, q, m, v, dim, **options)
    turn = q.double().mT @ before.double()
    expected = turn.square() @ square if dim == 0 else square @ turn.square().mT
    assert bool((v >= 0).all())
    # errors of S, where it is split, let a little of the largest elements into the smallest
    assert float(((v - expected).abs() / expected).max()) < (5e-4 if with_momentum else 3e-2)
    off = (v - expected).norm() / expected.norm()
    assert 0 < float(off) < 1e-5
    assert float((1.01 * v - expected).norm() / expected.norm()) > 1e-3
    torch.testing.assert_close(v.double().sum(), square.sum(), rtol=1e-5, atol=0)
    if m is not None and momentum is not None:  # in true fp32
        turned = turn @ momentum if dim == 0 else momentum @ turn.mT
        torch.testing.assert_close(m.double(), turned, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", ["qr", "cholesky_qr"])
def test_other_methods_stay_in_true_fp32(method: str, split_on_cpu: pytest.MonkeyPatch) -> None:
    u, (q, *_) = bases(64, 64)
    k = factor("flat", u)
    found, _ = get_eigenbasis_qr(k, q, power_iter_steps=2, method=method)
    split_on_cpu.setattr(split_products, "has_wide_products", lambda x: False)
    expected, _ = get_eigenbasis_qr(k, q, power_iter_steps=2, method=method)
    assert torch.equal(found, expected)


def losses(cls: type[MatrixOptimizer], seed: int, steps: int = 40) -> Tensor:
    """Train a linear model, and return its losses."""
    x = (randn(256, 64, seed=seed) * torch.arange(1, 65) ** -0.5).float()
    y = x @ randn(64, 64, seed=seed + 100).float()
    p = parameter(64, 64)
    torch.nn.init.zeros_(p)
    options: Any = {"refresh_method": "root_qr", "precondition_frequency": 2}
    a = Run(cls([p], lr=0.1, weight_decay=0.0, **options), [p])
    found = []
    for step in range(steps):
        rows = slice(64 * (step % 4), 64 * (step % 4) + 64)
        p.grad = x[rows].mT @ (x[rows] @ p.detach() - y[rows]) / 64
        a.optimizer.step()
        found.append((x @ p.detach() - y).square().mean())
    assert a.optimizer.counters["refreshes_retried"] == 0
    return torch.stack(found)


@pytest.mark.parametrize("cls", [SOAP, KLSOAP], ids=["SOAP", "KLSOAP"])
def test_training_has_the_loss_of_true_fp32(
    cls: type[MatrixOptimizer], split_on_cpu: pytest.MonkeyPatch
) -> None:
    """Losses differ by less than 0.5 %, those of seeds by a fifth."""
    ends = []
    for on_gpu in (True, False):
        split_on_cpu.setattr(split_products, "has_wide_products", lambda on, on_gpu=on_gpu: on_gpu)
        ends.append(torch.stack([losses(cls, seed)[-5:].mean() for seed in range(3)]))
    split, plain = ends
    assert float(plain.max()) < 0.3 * float(losses(cls, 0, 1)[0])
    assert float(((split - plain) / plain).abs().max()) < 0.005


# --- launches -------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts operators, without views and fresh memory."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        self.num += not (func.is_view or name.startswith(("empty", "_unsafe_view", "detach")))
        if name == "baddbmm.dtype_out":  # torch has no shape function for it
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("n", "most"), [(1024, 290), (2048, 290), (4096, 480)])
def test_a_split_refresh_is_few_launches(
    n: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "is_gpu", lambda on: True)
    monkeypatch.setattr(split_products, "has_wide_products", lambda x: True)
    k = torch.empty(2, n, n, device="meta")
    with Calls() as calls:
        iterate(k, k, 1, "root_qr")
    assert calls.num <= most
