"""When and how bases are refreshed: methods, the skip criterion, spreading over an interval,
failures."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import FEW_SOAP_KINDS, Run, give_gradients, run_of, same, whole
from torch import Tensor

from lather.optim import SOAP
from lather.optim.batched import optimizer
from lather.optim.batched.formats import pack
from lather.optim.batched.refresh import DimRefresh
from lather.optim.linalg import eigenbasis

few_kinds = pytest.mark.parametrize("kind", FEW_SOAP_KINDS)
FP64 = {"dtype": torch.float64, "state_dtype": torch.float64}


def rotated(a: Run, dim: int, row: Any = ...) -> Tensor:
    """Return Q^T K Q of the first parameter."""
    k, q = (whole(a.state(0))[f"{name}_{dim}"][row] for name in ("factor", "basis"))
    return q.T @ k @ q


def off_diagonal(x: Tensor) -> float:
    return float((x - x.diagonal().diag()).norm() / x.norm())


def copies(a: Run) -> list[dict[str, Tensor]]:
    states = [a.state(i) for i in range(len(a.params))]
    return [{name: x.clone() for name, x in state.items()} for state in states]


# --- methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_first_bases_by_iteration_are_all_but_eigenvectors_of_first_factors(
    dtype: torch.dtype,
) -> None:
    """Gradients have singular values 1 / i, which fall off as in a model's first step."""
    a = run_of(SOAP, [(48, 80)], dtype, state_dtype=dtype, first_bases="iteration")
    generators = [torch.Generator().manual_seed(n) for n in (48, 80)]
    u, v = (
        torch.linalg.qr(torch.randn(n, 48, generator=generator, dtype=dtype)).Q
        for n, generator in zip((48, 80), generators, strict=True)
    )
    a.params[0].grad = (u / torch.arange(1, 49)) @ v.T
    a.optimizer.step()
    for dim in (0, 1):
        k, q = (whole(a.state(0))[f"{name}_{dim}"] for name in ("factor", "basis"))
        torch.testing.assert_close(q.T @ q, torch.eye(len(q), dtype=dtype), rtol=0, atol=1e-5)
        assert off_diagonal(rotated(a, dim)) <= 0.05
        assert off_diagonal(k) > 0.2
    counts = a.optimizer.counters
    assert (counts["refreshes_done"], counts["refreshes_retried"]) == (2, 0)


def test_first_bases_by_iteration_fall_back_to_eigh_and_idle_experts_keep_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"matrix_layout": "per_expert", "first_bases": "iteration"}
    a, b = (run_of(SOAP, [(3, 6, 5)], **options) for _ in range(2))
    for one in (a, b):
        give_gradients(one.params, 0)
        one.params[0].grad[1] = 0
    a.optimizer.step()
    assert torch.equal(a.state(0)["basis_0"][1], torch.eye(6))
    assert not torch.equal(a.state(0)["basis_0"][0], torch.eye(6))
    real, failed = eigenbasis.iterate, torch.ones(3, dtype=torch.bool)
    monkeypatch.setattr(eigenbasis, "iterate", lambda *args: (*real(*args)[:2], failed))
    b.optimizer.step()
    counts = b.optimizer.counters
    assert (counts["refreshes_done"], counts["refreshes_retried"]) == (6, 6)
    assert off_diagonal(rotated(b, 0, 0)) <= 1e-5


def test_on_a_gpu_larger_first_bases_are_found_without_eigh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    monkeypatch.setattr(eigenbasis, "is_gpu", lambda on: True)
    a = run_of(SOAP, [(80, 70)])
    a.steps(range(1))
    counts = a.optimizer.counters
    assert (counts["refreshes_done"], counts["refreshes_retried"]) == (2, 0)


# --- the skip criterion ---------------------------------------------------------------------------


def around_the_refresh(a: Run, before: Callable[[], None] = lambda: None) -> list[Any]:
    """Take a step; return the states before and after its refresh, and what it counted. `before`
    is called before the refresh."""
    seen: list[Any] = []

    def refresh(runs: Any) -> None:
        before()
        counts = Counter(a.optimizer.counters)
        seen.append(copies(a))
        type(a.optimizer)._refresh_bases(a.optimizer, runs)
        seen.append(copies(a))
        seen.append(dict(Counter(a.optimizer.counters) - counts))

    a.optimizer._refresh_bases = refresh
    a.steps([9])
    return seen


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second_moment", ["permute", "rotate"])
@pytest.mark.parametrize("method", ["qr", "cholesky_qr", "eigh"])
@pytest.mark.parametrize("layout", ["tensor", "per_expert"])
def test_when_all_factors_are_skipped_nothing_changes(
    method: str, second_moment: str, state_dtype: torch.dtype, layout: str
) -> None:
    options = {"second_moment": second_moment, "refresh_method": method, "matrix_layout": layout}
    options |= {"state_dtype": state_dtype, "precondition_frequency": 1}
    a = run_of(SOAP, [(5, 8) if layout == "tensor" else (2, 3, 4)], **options)
    a.steps(range(3))
    a.groups[0].update(use_adaptive_criteria=True, adaptive_update_tolerance=0.999)
    (before,), (after,), counts = around_the_refresh(a)
    assert all(same(x, after[name]) for name, x in before.items())
    assert counts == {"refreshes_skipped": 2 if layout == "tensor" else 4}


@few_kinds
def test_each_factor_is_skipped_or_refreshed_by_itself(kind: str) -> None:
    """One factor is made diagonal in its basis before the refresh, the other is not; momentum ends
    in the current bases."""
    a = run_of(kind, [(4, 6)], **FP64, precondition_frequency=1, use_adaptive_criteria=True)
    a.steps(range(5))
    w = torch.arange(4.0, 0, -1, dtype=torch.float64)

    def diagonalize() -> None:
        q = a.state(0)["basis_0"]
        a.state(0)["factor_0"].copy_(pack(q @ w.diag() @ q.T))

    (before,), (after,), counts = around_the_refresh(a, diagonalize)
    assert counts == {"refreshes_done": 1, "refreshes_skipped": 1}
    assert same(after["basis_0"], before["basis_0"])
    assert not torch.equal(after["basis_1"], before["basis_1"])
    outside = [x["basis_0"] @ x["exp_avg"] @ x["basis_1"].T for x in (before, after)]
    torch.testing.assert_close(outside[1], outside[0], rtol=0, atol=1e-12)
    if "eigenvalues_0" in after:
        torch.testing.assert_close(after["eigenvalues_0"], w, rtol=1e-12, atol=0)


def test_the_first_bases_are_never_skipped() -> None:
    options = {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.999}
    a = run_of(SOAP, [(4, 6)], **options, precondition_frequency=1)
    a.steps(range(1))
    assert a.optimizer.counters["refreshes_done"] == 2
    a.steps(range(1, 3))
    counts = a.optimizer.counters
    assert (counts["refreshes_done"], counts["refreshes_skipped"]) == (2, 4)


# --- spread over the interval ---------------------------------------------------------------------

STAGGERED = [(8, 8), (12, 4), (8, 8), (5, 6, 4), (16, 3), (4, 4), (12, 4)]


def refresh_cost(shape: tuple[int, ...], dims: tuple[int, ...]) -> float:
    """Count the flops of K Q and QR for each factor, and of carrying the momentum over."""
    return sum((2 + 8 / 3) * shape[dim] ** 3 + 4 * shape[dim] * math.prod(shape) for dim in dims)


class Watched:
    """Notes which matrices are refreshed at which step, and what they cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.matrices: list[Counter[tuple[int, int, int]]] = []
        self.costs: list[float] = []
        self.are_first: list[bool] = []
        self.largest = 0.0
        original = optimizer.refresh

        def refresh(jobs: list[DimRefresh], count: Any) -> None:
            for job in jobs:
                self.note(job)
            original(jobs, count)

        monkeypatch.setattr(optimizer, "refresh", refresh)

    def note(self, job: DimRefresh) -> None:
        bucket = job.run.bucket
        self.are_first[-1] |= job.run.due.first
        self.largest = max(self.largest, refresh_cost(bucket.inner, bucket.dims))
        for row in job.rows:
            self.matrices[-1][id(bucket), row, job.dim] += 1
            self.costs[-1] += refresh_cost(bucket.inner, (job.dim,))

    def run(self, a: Run, steps: range) -> None:
        for step in steps:
            self.matrices.append(Counter())
            self.costs.append(0.0)
            self.are_first.append(False)
            a.steps([step])

    def assert_spread(self, begin: int, interval: int) -> int:
        """Check that an interval refreshes every factor once and costs the same at every step;
        returns the number of factors."""
        steps = slice(begin, begin + interval)
        seen, total = sum(self.matrices[steps], Counter()), sum(self.costs[steps])
        assert set(seen.values()) == {1}
        assert all(abs(cost - total / interval) <= self.largest for cost in self.costs[steps])
        return len(seen)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize("interval", [2, 5, 7])
@pytest.mark.parametrize("kind", ["soap", "soap_per_expert", "kl_soap_per_expert"])
def test_staggered_refreshes_come_once_an_interval_and_cost_the_same_at_every_step(
    kind: str, interval: int, watched: Watched
) -> None:
    a = run_of(kind, STAGGERED, precondition_frequency=interval, stagger_refresh=True)
    watched.run(a, range(3 * interval))
    num_experts = 5 if "per_expert" in kind else 0
    for begin in (interval, 2 * interval):
        found = watched.assert_spread(begin, interval)
        assert found == 2 * 6 + (2 * num_experts or 3)
    if num_experts and interval <= 6 + num_experts:
        for step in watched.matrices[interval : 2 * interval]:
            assert len({row for _, row, dim in step if dim == 0}) < 6 + num_experts


@pytest.mark.parametrize(
    ("kind", "begin"),
    [("soap", 0), ("soap_per_expert", 0), ("kl_soap_per_expert", 1), ("soap_muon", 0)],
)
def test_first_bases_are_spread_over_an_interval_if_asked(
    kind: str, begin: int, watched: Watched
) -> None:
    options = {"precondition_frequency": 5, "stagger_refresh": True, "stagger_first": True}
    watched.run(run_of(kind, STAGGERED * 3, **options), range(15))
    for low in (begin, begin + 5):
        watched.assert_spread(low, 5)
    assert watched.are_first[begin:] == [True] * 5 + [False] * (15 - begin - 5)


def test_all_first_bases_come_at_once_where_steps_of_the_warm_up_refresh(watched: Watched) -> None:
    options = {"precondition_frequency": 5, "stagger_refresh": True, "stagger_first": True}
    watched.run(run_of("soap", STAGGERED, precondition_warmup_steps=4, **options), range(6))
    assert watched.are_first == [True] + [False] * 5
    assert watched.costs[0] == watched.costs[1] == watched.costs[3] > watched.costs[5]


# --- failures -------------------------------------------------------------------------------------


def broken(k: Tensor) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


@pytest.mark.parametrize("kind", ["soap", "rekls"])
def test_eigh_that_fails_keeps_the_old_basis_and_is_counted_and_logged(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = run_of(kind, [(4, 6)], precondition_frequency=1, refresh_method="eigh")
    a.steps(range(3))
    (before,) = copies(a)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="lather"):
        patch.setattr(torch.linalg, "eigh", broken)
        a.steps(range(3, 4))
    of_bases = [name for name in before if name.startswith(("basis", "eigenvalues"))]
    assert all(same(a.state(0)[name], before[name]) for name in of_bases)
    assert a.optimizer.counters["refreshes_failed"] == 2
    assert all(size in caplog.text for size in ("4 x 4", "6 x 6"))
    assert a.params[0].isfinite().all()
    assert not torch.equal(a.state(0)["exp_avg"], before["exp_avg"])
    a.steps(range(4, 5))
    assert a.optimizer.counters["refreshes_failed"] == 2
    assert not torch.equal(a.state(0)["basis_0"], before["basis_0"])


@pytest.mark.parametrize("method", ["cholesky_qr", "auto"])
@few_kinds
def test_cholesky_qr_that_fails_is_done_by_qr(kind: str, method: str) -> None:
    """Gradients of rank one leave factors on which Cholesky-QR fails."""
    shapes = [(6, 5), (2, 6, 5)]
    a = run_of(kind, shapes, precondition_frequency=1, refresh_method=method)
    b = run_of(kind, shapes, precondition_frequency=1, refresh_method="qr")
    for step in range(4):
        for one in (a, b):
            give_gradients(one.params, step)
            for p in one.params:
                p.grad = p.grad[..., :1] @ p.grad[..., :1, :]
            one.optimizer.step()
    counts, retried = a.optimizer.counters, a.optimizer.counters["refreshes_retried"]
    assert retried > 0 or method == "auto"
    assert counts == {**b.optimizer.counters, "refreshes_retried": retried}
    assert counts["refreshes_failed"] == 0
    for q in [x for state in copies(a) for name, x in state.items() if name.startswith("basis")]:
        eye = torch.eye(q.shape[-1]).expand_as(q)
        torch.testing.assert_close(q.mT @ q, eye, rtol=0, atol=1e-5)


def test_a_factor_that_is_not_finite_costs_its_own_refresh_alone() -> None:
    a = run_of(SOAP, [(4, 4)] * 3, precondition_frequency=1)
    a.steps(range(2))
    a.state(1)["factor_0"][0, 0] = torch.nan
    before = copies(a)
    a.steps(range(2, 3))
    unchanged = [same(a.state(i)["basis_0"], old["basis_0"]) for i, old in enumerate(before)]
    assert unchanged == [False, True, False]
    assert not same(a.state(1)["basis_1"], before[1]["basis_1"])
    assert a.optimizer.counters["refreshes_failed"] == 1
    assert all(p.isfinite().all() for p in a.params)
