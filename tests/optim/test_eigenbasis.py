"""Eigenbases: how moments follow them, when they are skipped, and what happens when a decomposition fails."""

import copy
from typing import Any

import pytest
import torch
from soap_helpers import give_gradients, parameter, run, same
from torch import Tensor

from lather.optim import SOAP, eigenbasis


def test_rotating_keeps_the_mass_of_the_second_moment_and_its_sign() -> None:
    p = parameter(12, 7)
    optimizer = SOAP([p], precondition_frequency=1, second_moment="rotate", betas=(0.9, 0.999), state_dtype=torch.float64)
    permuted = copy.deepcopy(optimizer)
    run(optimizer, [p], range(6))
    give_gradients([p], 6)
    state = optimizer.state[p]
    v = state["exp_avg_sq"]
    mass_before = v.sum().item()
    eigenbasis.update_eigenbasis_and_momentum(
        {dim: state[f"factor_{dim}"].unsqueeze(0) for dim in (0, 1)},
        {dim: state[f"basis_{dim}"].unsqueeze(0) for dim in (0, 1)},
        state["exp_avg"].unsqueeze(0),
        v.unsqueeze(0),
        second_moment="rotate",
    )
    assert v.min() >= 0
    assert v.sum().item() == pytest.approx(mass_before, rel=1e-12)
    assert permuted.param_groups[0]["second_moment"] == "rotate"


def test_permuting_moves_the_second_moment_with_its_columns() -> None:
    """A diagonal factor whose order is wrong: columns, and what is kept in their coordinates, must be put in order together."""
    factors = {0: torch.diag(torch.tensor([1.0, 3.0, 2.0])).unsqueeze(0)}
    bases = {0: torch.eye(3).unsqueeze(0)}
    m, v = torch.tensor([[10.0, 30.0, 20.0]]), torch.tensor([[1.0, 3.0, 2.0]])
    eigenbasis.update_eigenbasis_and_momentum(factors, bases, m, v, second_moment="permute")
    assert v.tolist() == [[3.0, 2.0, 1.0]]
    assert m.abs().tolist() == [[30.0, 20.0, 10.0]]
    assert bases[0].abs()[0].argmax(0).tolist() == [1, 2, 0]


def test_when_all_factors_are_skipped_nothing_changes() -> None:
    p = parameter(5, 8)
    optimizer = SOAP([p], precondition_frequency=1, adam_warmup_steps=3)
    run(optimizer, [p], range(8))
    state = optimizer.state[p]
    names = ("basis_0", "basis_1", "exp_avg", "exp_avg_sq")
    before = {key: state[key].clone() for key in names}
    for second_moment in ("permute", "rotate"):
        counts = eigenbasis.update_eigenbasis_and_momentum(
            {dim: state[f"factor_{dim}"].unsqueeze(0) for dim in (0, 1)},
            {dim: state[f"basis_{dim}"].unsqueeze(0) for dim in (0, 1)},
            state["exp_avg"].unsqueeze(0),
            state["exp_avg_sq"].unsqueeze(0),
            second_moment=second_moment,
            tolerance=0.999,
        )
        assert int(counts.skipped) == 2
        assert all(same(state[key], value) for key, value in before.items())


def test_momentum_ends_in_the_current_basis_when_only_one_factor_is_skipped() -> None:
    torch.manual_seed(0)
    g = torch.randn(1, 6, 6, dtype=torch.float64)
    factors = {0: g @ g.mT, 1: torch.diag(torch.arange(6.0, 0, -1, dtype=torch.float64)).unsqueeze(0)}
    bases = {0: torch.linalg.qr(torch.randn_like(g)).Q, 1: torch.eye(6, dtype=torch.float64).unsqueeze(0)}
    m = torch.randn_like(g)
    outside = eigenbasis.precondition(m, bases, "out")
    counts = eigenbasis.update_eigenbasis_and_momentum(factors, bases, m, g.square(), tolerance=1e-7)
    assert (int(counts.skipped), int(counts.done)) == (1, 1)
    torch.testing.assert_close(eigenbasis.precondition(m, bases, "out"), outside, rtol=0, atol=1e-13)


def test_eigh_that_fails_in_fp32_is_retried_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def fails_in_fp32(k: Tensor) -> Any:
        if k.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(k)

    x = torch.randn(3, 5, 5)
    expected, _ = eigenbasis.get_eigenbasis_eigh(x @ x.mT)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    found, failed = eigenbasis.get_eigenbasis_eigh(x @ x.mT)
    assert not failed.any()
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=0, atol=1e-3)


def test_eigh_that_always_fails_keeps_the_old_basis_and_is_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p = parameter(4, 6)
    optimizer = SOAP([p], precondition_frequency=1, use_eigh=True)
    run(optimizer, [p], range(3))
    basis, momentum = optimizer.state[p]["basis_1"].clone(), optimizer.state[p]["exp_avg"].clone()

    def fails(k: Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    run(optimizer, [p], range(3, 4))
    assert same(optimizer.state[p]["basis_1"], basis)
    assert optimizer.counters["refreshes_failed"] == 2
    assert "6 x 6" in caplog.text
    assert p.isfinite().all()
    assert not torch.equal(optimizer.state[p]["exp_avg"], momentum)


def test_one_bad_matrix_does_not_cost_the_others_their_basis() -> None:
    x = torch.randn(3, 4, 4)
    k = x @ x.mT
    k[1] = torch.nan
    old = torch.linalg.qr(torch.randn(3, 4, 4)).Q
    q, failed = eigenbasis.get_eigenbasis_eigh(k, old)
    assert failed.tolist() == [False, True, False]
    assert torch.equal(q[1], old[1])
    for index in (0, 2):
        rotated = q[index].T @ k[index] @ q[index]
        assert (rotated - rotated.diagonal().diag()).abs().max() < 1e-4
