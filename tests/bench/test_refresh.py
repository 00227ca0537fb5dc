"""The refresh of a transformer's factors: its contestants and their check, which need no CUDA,
unlike its timing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.check import CheckError
from benchmarks.gpu import refresh
from benchmarks.gpu.refresh import (
    Factors,
    check_refreshes,
    refresh_batched_by_lather,
    refresh_one_by_one,
    transformer_factors,
)
from lather.optim.linalg import orthogonal

CPU = torch.device("cpu")


@pytest.fixture
def factors() -> list[Factors]:
    return transformer_factors(8, 16, CPU, num_layers=2)


def test_a_transformer_of_twelve_layers_has_96_factors() -> None:
    assert [tuple(f.k.shape) for f in transformer_factors(4, 6, CPU)] == [(72, 4, 4), (24, 6, 6)]


@pytest.mark.parametrize("as_on_a_gpu", [False, True], ids=["cpu", "gpu"])
def test_both_refreshes_agree(
    factors: list[Factors], as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "is_gpu", lambda on: as_on_a_gpu)
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
