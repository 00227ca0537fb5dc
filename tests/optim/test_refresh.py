"""When and how bases are refreshed: methods, the skip criterion, spreading over an interval,
failures."""

import logging
import math
from collections import Counter
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_SOAP_KINDS,
    FULL_RANK,
    clones,
    give_gradients,
    make,
    parameter,
    parameters,
    run,
    run_both,
    same,
)
from torch import Tensor

from lather.optim import KLSOAP, SOAP
from lather.optim.batched import optimizer
from lather.optim.batched.refresh import DimRefresh
from lather.optim.linalg import eigenbasis

few_kinds = pytest.mark.parametrize("kind", FEW_SOAP_KINDS)

# --- methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cholesky_qr", "auto"])
@few_kinds
def test_ways_of_orthogonal_iteration_find_the_same_bases_up_to_signs(
    kind: str, method: str
) -> None:
    params = parameters([(6, 4), (3, 4, 5)], torch.float64)
    others = clones(params)
    a, b = (
        make(kind, params, **FULL_RANK, refresh_method="qr"),
        make(kind, others, **FULL_RANK, refresh_method=method),
    )
    run_both((a, params), (b, others), range(10))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
        for name in a.state[p]:
            if name.startswith("basis"):
                along = (a.state[p][name] * b.state[q][name]).sum(-2).abs()
                torch.testing.assert_close(along, torch.ones_like(along), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"refresh_method": "eigh"}, {"use_eigh": True}], ids=["method", "use_eigh"]
)
@pytest.mark.parametrize("cls", [SOAP, KLSOAP], ids=["SOAP", "KLSOAP"])
def test_eigh_gives_eigenvectors_with_eigenvalues_descending(
    cls: Any, options: dict[str, Any]
) -> None:
    if cls is KLSOAP and "use_eigh" in options:
        options = {"refresh_method": "eigh"}
    p = parameter(5, 7, dtype=torch.float64)
    opt = cls([p], lr=1e-2, precondition_frequency=1, state_dtype=torch.float64, **options)
    run(opt, [p], range(5))
    for dim in (0, 1):
        k, q = opt.state[p][f"factor_{dim}"], opt.state[p][f"basis_{dim}"]
        rotated = q.T @ k @ q
        w = rotated.diagonal()
        torch.testing.assert_close(rotated, w.diag(), rtol=0, atol=1e-12 * float(w.max()))
        assert bool((w[:-1] >= w[1:] - 1e-12 * w.max()).all())
        if cls is KLSOAP:
            torch.testing.assert_close(
                opt.state[p][f"eigenvalues_{dim}"], w, rtol=1e-12, atol=1e-12
            )


def test_more_power_iterations_come_nearer_to_the_eigenvectors() -> None:
    left = []
    for steps in (1, 3, 12):
        p = parameter(6, 6, dtype=torch.float64)
        opt = SOAP([p], precondition_frequency=1, power_iter_steps=steps, state_dtype=torch.float64)
        run(opt, [p], range(4))
        k, q = opt.state[p]["factor_0"], opt.state[p]["basis_0"]
        rotated = q.T @ k @ q
        left.append(float((rotated - rotated.diagonal().diag()).norm() / rotated.norm()))
    assert left[0] > 2 * left[1] > 4 * left[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_first_bases_by_iteration_are_all_but_eigenvectors_of_first_factors(
    dtype: torch.dtype,
) -> None:
    """Gradients have singular values 1 / i, which fall off as in a model's first step."""
    p = parameter(48, 80, dtype=dtype)
    u, v = (
        torch.linalg.qr(
            torch.randn(n, 48, generator=torch.Generator().manual_seed(n), dtype=dtype)
        ).Q
        for n in p.shape
    )
    opt = SOAP([p], state_dtype=dtype, first_bases="iteration")
    p.grad = (u / torch.arange(1, 49)) @ v.T
    opt.step()
    for dim in (0, 1):
        k, q = opt.state[p][f"factor_{dim}"], opt.state[p][f"basis_{dim}"]
        rotated = q.T @ k @ q
        torch.testing.assert_close(q.T @ q, torch.eye(len(q), dtype=dtype), rtol=0, atol=1e-5)
        assert (rotated - rotated.diagonal().diag()).norm() <= 0.05 * rotated.norm()
        assert (k - k.diagonal().diag()).norm() > 0.2 * k.norm()
    assert (opt.counters["refreshes_done"], opt.counters["refreshes_retried"]) == (2, 0)


def test_first_bases_by_iteration_fall_back_to_eigh_and_idle_experts_keep_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = parameter(3, 6, 5)
    opt = SOAP([p], matrix_layout="per_expert", first_bases="iteration")
    p.grad = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(0))
    p.grad[1] = 0
    opt.step()
    assert torch.equal(opt.state[p]["basis_0"][1], torch.eye(6))
    assert not torch.equal(opt.state[p]["basis_0"][0], torch.eye(6))
    again = SOAP([p], matrix_layout="per_expert", first_bases="iteration")
    real = eigenbasis.iterate
    monkeypatch.setattr(
        eigenbasis, "iterate", lambda *args: (*real(*args)[:2], torch.ones(3, dtype=torch.bool))
    )
    again.step()
    assert (again.counters["refreshes_done"], again.counters["refreshes_retried"]) == (6, 6)
    k, q = again.state[p]["factor_0"][0], again.state[p]["basis_0"][0]
    rotated = q.T @ k @ q
    assert (rotated - rotated.diagonal().diag()).norm() <= 1e-5 * rotated.norm()


def test_on_a_gpu_larger_first_bases_are_found_without_eigh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    monkeypatch.setattr(eigenbasis, "is_gpu", lambda on: True)
    p = parameter(80, 70)
    opt = SOAP([p])
    run(opt, [p], range(1))
    assert (opt.counters["refreshes_done"], opt.counters["refreshes_retried"]) == (2, 0)


# --- the skip criterion ---------------------------------------------------------------------------


def names_of(state: dict[str, Tensor], *prefixes: str) -> list[str]:
    return [name for name in state if name.startswith(prefixes)]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second_moment", ["permute", "rotate"])
@pytest.mark.parametrize("method", ["qr", "cholesky_qr", "eigh"])
def test_when_all_factors_are_skipped_nothing_changes(
    method: str, second_moment: str, state_dtype: torch.dtype
) -> None:
    """The moments' decay rate is one, so that only the refresh could change them."""
    p, e = parameter(5, 8), parameter(2, 3, 4)
    options = {"second_moment": second_moment, "refresh_method": method, "state_dtype": state_dtype}
    opt = SOAP(
        [{"params": [p]}, {"params": [e], "matrix_layout": "per_expert"}],
        precondition_frequency=1,
        **options,
    )
    run(opt, [p, e], range(3))
    opt.param_groups[0].update(use_adaptive_criteria=True, adaptive_update_tolerance=0.999)
    opt.param_groups[1].update(use_adaptive_criteria=True, adaptive_update_tolerance=0.999)
    done = opt.counters["refreshes_done"]
    seen: list[dict[str, Tensor]] = []

    def remember(runs: Any) -> None:
        seen.append(
            {
                f"{i}{name}": x.clone()
                for i, q in enumerate((p, e))
                for name, x in opt.state[q].items()
            }
        )
        type(opt)._refresh_bases(opt, runs)
        seen.append(
            {
                f"{i}{name}": x.clone()
                for i, q in enumerate((p, e))
                for name, x in opt.state[q].items()
            }
        )

    opt._refresh_bases = remember  # type: ignore[method-assign]
    run(opt, [p, e], range(3, 4))
    assert all(same(x, seen[1][name]) for name, x in seen[0].items())
    assert opt.counters["refreshes_skipped"] == 2 + 2 * 2
    assert opt.counters["refreshes_done"] == done


@few_kinds
def test_each_factor_is_skipped_or_refreshed_by_itself(kind: str) -> None:
    """One factor is made diagonal in its basis before the refresh, the other is not; momentum ends
    in the current bases."""
    p = parameter(4, 6, dtype=torch.float64)
    opt = make(
        kind, [p], state_dtype=torch.float64, precondition_frequency=1, use_adaptive_criteria=True
    )
    run(opt, [p], range(5))
    state = opt.state[p]
    before: dict[str, Tensor] = {}

    def tampered(runs: Any) -> None:
        q = state["basis_0"]
        state["factor_0"].copy_(q @ torch.arange(4.0, 0, -1, dtype=torch.float64).diag() @ q.T)
        before.update({name: x.clone() for name, x in state.items()})
        counts = dict(opt.counters)
        type(opt)._refresh_bases(opt, runs)
        before["counts"] = {name: number - counts[name] for name, number in opt.counters.items()}
        before["exp_avg_after"] = state["exp_avg"].clone()

    opt._refresh_bases = tampered  # type: ignore[method-assign]
    run(opt, [p], range(5, 6))
    assert before["counts"] == {
        "refreshes_done": 1,
        "refreshes_skipped": 1,
        "refreshes_retried": 0,
        "refreshes_failed": 0,
        "nonfinite_skipped": 0,
    }
    assert same(state["basis_0"], before["basis_0"])
    assert not torch.equal(state["basis_1"], before["basis_1"])
    outside = before["basis_0"] @ before["exp_avg"] @ before["basis_1"].T
    torch.testing.assert_close(
        state["basis_0"] @ before["exp_avg_after"] @ state["basis_1"].T, outside, rtol=0, atol=1e-12
    )
    if "eigenvalues_0" in state:
        torch.testing.assert_close(
            state["eigenvalues_0"],
            torch.arange(4.0, 0, -1, dtype=torch.float64),
            rtol=1e-12,
            atol=0,
        )


def test_the_first_bases_are_never_skipped() -> None:
    p = parameter(4, 6)
    opt = SOAP(
        [p], use_adaptive_criteria=True, adaptive_update_tolerance=0.999, precondition_frequency=1
    )
    run(opt, [p], range(1))
    assert opt.counters["refreshes_done"] == 2
    run(opt, [p], range(1, 3))
    assert (opt.counters["refreshes_done"], opt.counters["refreshes_skipped"]) == (2, 4)


# --- spread over the interval ---------------------------------------------------------------------

STAGGERED = [(8, 8), (12, 4), (8, 8), (5, 6, 4), (16, 3), (4, 4), (12, 4)]


def refresh_cost(shape: tuple[int, ...], dims: tuple[int, ...]) -> float:
    """Count the flops of K Q and QR for each factor, and of carrying the momentum over."""
    return sum((2 + 8 / 3) * shape[dim] ** 3 + 4 * shape[dim] * math.prod(shape) for dim in dims)


class Watched:
    """An optimizer that notes which matrices are refreshed at which step, and what they cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.matrices: list[Counter[tuple[int, int, int]]] = []
        self.costs: list[float] = []
        self.are_first: list[bool] = []
        self.largest = 0.0
        original = optimizer.refresh

        def refresh(jobs: list[DimRefresh], count: Any) -> None:
            self.note(jobs)
            original(jobs, count)

        monkeypatch.setattr(optimizer, "refresh", refresh)

    def note(self, jobs: list[DimRefresh]) -> None:
        for job in jobs:
            self.are_first[-1] |= job.run.due.first
            for row in job.rows:
                self.matrices[-1][id(job.run.bucket), row, job.dim] += 1
                self.costs[-1] += refresh_cost(job.run.bucket.inner, (job.dim,))
                self.largest = max(
                    self.largest, refresh_cost(job.run.bucket.inner, job.run.bucket.dims)
                )

    def run(
        self, opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range
    ) -> None:
        for step in steps:
            self.matrices.append(Counter())
            self.costs.append(0.0)
            self.are_first.append(False)
            run(opt, params, [step])


@pytest.mark.parametrize("interval", [2, 5, 7])
@pytest.mark.parametrize("kind", ["soap", "soap_per_expert", "kl_soap_per_expert"])
def test_staggered_refreshes_come_once_an_interval_and_cost_the_same_at_every_step(
    kind: str, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(STAGGERED)
    opt = make(kind, params, precondition_frequency=interval, stagger_refresh=True)
    run(opt, params, range(interval))
    watched = Watched(monkeypatch)
    watched.run(opt, params, range(interval, 3 * interval))
    matrices = 6 + (5 if "per_expert" in kind else 0)
    factors = 2 * 6 + (2 * 5 if "per_expert" in kind else 3)
    for start in (0, interval):
        seen = sum(watched.matrices[start : start + interval], Counter())
        assert set(seen.values()) == {1}
        assert len(seen) == factors
        total = sum(watched.costs[start : start + interval])
        for cost in watched.costs[start : start + interval]:
            assert abs(cost - total / interval) <= watched.largest
    if "per_expert" in kind and interval <= matrices:
        experts = [
            {row for _, row, dim in step if dim == 0} for step in watched.matrices[:interval]
        ]
        assert max(map(len, experts)) < matrices


@pytest.mark.parametrize(
    ("kind", "begin"),
    [("soap", 0), ("soap_per_expert", 0), ("kl_soap_per_expert", 1), ("soap_muon", 0)],
)
def test_first_bases_are_spread_over_an_interval_if_asked(
    kind: str, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, interval = parameters(STAGGERED * 3), 5
    opt = make(
        kind, params, precondition_frequency=interval, stagger_refresh=True, stagger_first=True
    )
    watched = Watched(monkeypatch)
    watched.run(opt, params, range(3 * interval))
    for low in (begin, begin + interval):
        seen = sum(watched.matrices[low : low + interval], Counter())
        assert set(seen.values()) == {1}
        total = sum(watched.costs[low : low + interval])
        assert all(
            abs(cost - total / interval) <= watched.largest
            for cost in watched.costs[low : low + interval]
        )
    assert watched.are_first[begin:] == [True] * interval + [False] * (
        len(watched.costs) - begin - interval
    )


def test_all_first_bases_come_at_once_where_steps_of_the_warm_up_refresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters(STAGGERED)
    options = {
        "precondition_frequency": 5,
        "precondition_warmup_steps": 4,
        "stagger_refresh": True,
        "stagger_first": True,
    }
    watched = Watched(monkeypatch)
    watched.run(make("soap", params, **options), params, range(6))
    assert watched.are_first[0]
    assert not any(watched.are_first[1:])
    assert watched.costs[0] == watched.costs[1] == watched.costs[3] > watched.costs[5]


def test_without_staggering_one_step_of_the_interval_pays_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters(STAGGERED)
    opt = make("soap", params, precondition_frequency=5)
    run(opt, params, range(5))
    watched = Watched(monkeypatch)
    watched.run(opt, params, range(5, 15))
    assert [cost > 0 for cost in watched.costs] == [False, False, False, False, True] * 2


def test_one_large_stack_of_experts_is_spread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parameter(12, 4, 4)
    opt = make("soap_per_expert", [p], precondition_frequency=4, stagger_refresh=True)
    run(opt, [p], range(4))
    watched = Watched(monkeypatch)
    watched.run(opt, [p], range(4, 8))
    assert [len(step) for step in watched.matrices] == [2 * 3] * 4


# --- failures -------------------------------------------------------------------------------------


def broken(k: Tensor) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


@pytest.mark.parametrize("kind", ["soap", "rekls"])
def test_eigh_that_fails_keeps_the_old_basis_and_is_counted_and_logged(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p = parameter(4, 6)
    opt = make(kind, [p], precondition_frequency=1, refresh_method="eigh")
    run(opt, [p], range(3))
    before = {name: x.clone() for name, x in opt.state[p].items()}
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="lather"):
        patch.setattr(torch.linalg, "eigh", broken)
        run(opt, [p], range(3, 4))
    for name in names_of(before, "basis", "eigenvalues"):
        assert same(opt.state[p][name], before[name])
    assert opt.counters["refreshes_failed"] == 2
    assert "4 x 4" in caplog.text
    assert "6 x 6" in caplog.text
    assert p.isfinite().all()
    assert not torch.equal(opt.state[p]["exp_avg"], before["exp_avg"])
    run(opt, [p], range(4, 5))
    assert opt.counters["refreshes_failed"] == 2
    assert not torch.equal(opt.state[p]["basis_0"], before["basis_0"])


def test_eigh_that_fails_in_fp32_is_done_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def fails_in_fp32(k: Tensor) -> Any:
        return broken(k) if k.dtype == torch.float32 else real(k)

    params, others = parameters([(6, 6)]), parameters([(6, 6)])
    a, b = make("rekls", params), make("rekls", others)
    run(a, params, range(4))
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", fails_in_fp32)
        run(b, others, range(4))
    assert b.counters == a.counters
    assert b.counters["refreshes_failed"] == 0
    torch.testing.assert_close(params[0], others[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["cholesky_qr", "auto"])
@few_kinds
def test_cholesky_qr_that_fails_is_done_by_qr(kind: str, method: str) -> None:
    """Gradients of rank one leave factors on which Cholesky-QR fails."""
    params, others = parameters([(6, 5), (2, 6, 5)]), parameters([(6, 5), (2, 6, 5)])
    a = make(kind, params, precondition_frequency=1, refresh_method=method)
    b = make(kind, others, precondition_frequency=1, refresh_method="qr")
    for step in range(4):
        for opt, those in ((a, params), (b, others)):
            for p in those:
                generator = torch.Generator().manual_seed(step)
                left, right = (
                    torch.randn((*p.shape[:-2], n, 1), generator=generator) for n in p.shape[-2:]
                )
                p.grad = left @ right.mT
            opt.step()
    assert a.counters["refreshes_retried"] > 0 or method == "auto"
    assert a.counters == {**b.counters, "refreshes_retried": a.counters["refreshes_retried"]}
    assert a.counters["refreshes_failed"] == 0
    for p in params:
        for name in names_of(a.state[p], "basis"):
            q = a.state[p][name]
            torch.testing.assert_close(
                q.mT @ q, torch.eye(q.shape[-1]).expand_as(q), rtol=0, atol=1e-5
            )


def test_a_factor_that_is_not_finite_costs_its_own_refresh_alone() -> None:
    params = parameters([(4, 4)] * 3)
    opt = SOAP(params, precondition_frequency=1)
    run(opt, params, range(2))
    opt.state[params[1]]["factor_0"][0, 0] = torch.nan
    before = [{name: x.clone() for name, x in opt.state[p].items()} for p in params]
    give_gradients(params, 2)
    opt.step()
    unchanged = [
        same(opt.state[p]["basis_0"], old["basis_0"]) for p, old in zip(params, before, strict=True)
    ]
    assert unchanged == [False, True, False]
    assert not same(opt.state[params[1]]["basis_1"], before[1]["basis_1"])
    assert opt.counters["refreshes_failed"] == 1
    assert all(p.isfinite().all() for p in params)
