"""The refresh of a transformer's factors: its contestants and their check, which need no CUDA,
unlike its timing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.check import CheckError
from benchmarks.gpu import refresh
from benchmarks.gpu.refresh import (
    CountedFlops,
    Factors,
    check_refreshes,
    refresh_batched_by_lather,
    refresh_one_by_one,
    transformer_factors,
)
from benchmarks.gpu.work import Settings
from benchmarks.launches.command import count
from benchmarks.launches.counter import Counter
from benchmarks.launches.gpu_cases import refresh_case
from lather.kernels import backend
from lather.optim.linalg import orthogonal

CPU = torch.device("cpu")


@pytest.fixture
def factors() -> list[Factors]:
    return transformer_factors(8, 16, CPU, num_layers=2)


def test_a_transformer_of_twelve_layers_has_96_factors() -> None:
    assert [tuple(f.k.shape) for f in transformer_factors(4, 6, CPU)] == [(72, 4, 4), (24, 6, 6)]


@pytest.mark.parametrize("as_refresh", [False, True], ids=["cpu", "gpu"])
def test_both_refreshes_agree(
    factors: list[Factors], as_refresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "is_gpu", lambda on: as_refresh)
    for ours, baseline in zip(
        refresh_batched_by_lather(factors), refresh_one_by_one(factors), strict=True
    ):
        torch.testing.assert_close(
            (ours.mT @ baseline).abs(), torch.eye(ours.shape[-1]).expand_as(ours), atol=1e-2, rtol=0
        )
    assert check_refreshes(factors)["off_diagonal_share"].keys() == {"lather", "one_by_one"}


@pytest.mark.parametrize(
    ("wrong", "message"), [("stale", "off-diagonal"), ("scaled", "orthonormal")]
)
def test_a_wrong_refresh_is_refused(
    factors: list[Factors], monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    def broken(given: Sequence[Factors]) -> list[Tensor]:
        return [f.q if wrong == "stale" else 1.01 * f.q for f in given]

    monkeypatch.setitem(refresh.REFRESHES, "lather", broken)
    with pytest.raises(CheckError, match=message):
        check_refreshes(factors)


def test_flops_are_those_of_the_products_and_factorizations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: four blocks of 256 rows, for which `lather.optim.linalg.orthogonal` states 2 +
    19/3 + 7/4 + 3/16 times n^3."""
    monkeypatch.setattr(orthogonal, "is_gpu", lambda on: True)
    n = 1024
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0))).Q
    factors = Factors(((q * torch.linspace(2, 1, n)) @ q.mT)[None], q[None])
    with CountedFlops() as counted:
        _ = factors.k @ factors.q
    assert counted.flops == 2 * n**3
    with CountedFlops() as counted:
        refresh_batched_by_lather([factors])
    assert counted.flops / n**3 == pytest.approx(2 + 19 / 3 + 7 / 4 + 3 / 16, rel=0.01)


def test_split_products_are_priced_as_bf16_and_their_flops_counted_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of them take the place of a product in fp32; the refresh is that of a GPU."""
    monkeypatch.setattr(backend, "HAS_TRITON", False)  # its interpreter needs values
    (row,) = count(refresh_case(512, 1024))
    total = row["total"]
    assert not total["unknown"]
    assert 0 < total["predicted_ms"]["fp32 GEMM"] < total["predicted_ms"]["GEMM"]
    with Counter() as counter, CountedFlops() as counted:
        k, q = (torch.empty(2, 1024, 1024, device=counter.device) for _ in range(2))
        refresh_batched_by_lather([Factors(k, q)])
    flops_in_fp32 = (2 + 19 / 3 + 7 / 4 + 3 / 16) * 2 * 1024**3
    assert counted.flops + counted.bf16_flops / 3 == pytest.approx(flops_in_fp32, rel=0.01)
    assert counted.bf16_flops / 3 > 0.75 * flops_in_fp32


def test_the_share_is_that_of_the_rate_of_products() -> None:
    """The goal is a share of what the device can do, and below all of it."""
    (row,) = refresh.rows(Settings(CPU, small=True), "")
    assert row["floor_ms"] == pytest.approx(1e3 * row["flops"] / row["product_flops_per_second"])
    assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"]["lather"]["median"])
    assert 0.5 < row["goal"] < 1
