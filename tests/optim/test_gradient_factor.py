"""A step with a factor is that of gradients multiplied before, whoever multiplies them: the engine,
in place, or on a GPU a rule's kernel as it reads them."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import (
    CODED_KINDS,
    COUPLED,
    KINDS,
    SHAPES,
    Run,
    all_same,
    assert_same,
    clones,
    copy_gradients,
    few_kinds,
    give_gradients,
    parameters,
    run_of,
    same,
    snapshot,
)
from pretended_boundary import crossing
from torch import Tensor

from in_turn import in_turn
from lather.kernels.momentum import nesterov_
from lather.optim import MatrixOptimizer, Muon, SOAPMuon, State
from lather.optim.batched import formats, roster
from lather.optim.rules import muon
from lather.optim.rules.muon import MuonRule
from lather.optim.rules.soap_muon import SOAPMuonRule

FACTOR = 0.37
TAKES_FACTOR = {
    *("muon", "muon_per_head", "adamuon"),
    *("soap_muon", "soap_muon_per_expert", "soap_muon_int8"),
}
"""Kinds whose kernels multiply the gradients of matrices on a GPU."""
FOLDING = ("muon", "adamuon", "soap_muon", "soap_muon_per_expert")
ELSEWHERE: tuple[dict[str, Any], ...] = (
    COUPLED,
    {"slow_momentum_start": 2},
    {"nesterov": False},
)
"""Options with which no kernel multiplies gradients."""


@pytest.fixture(autouse=True)
def code_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in 8 bits is for matrices of any size here."""
    monkeypatch.setattr(formats, "MIN_CODED", 1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that take the factor on a GPU take it here; their kernels are the references."""
    monkeypatch.setattr(roster, "is_gpu", lambda on: True)


def multiplied(a: Run, b: Run, step: int) -> list[Tensor]:
    """Take a step of `a` with a factor, and one of `b` with gradients multiplied before; return
    the gradients as they were."""
    give_gradients(a.params, step)
    if step == 1:
        a.params[1].grad[0].zero_()  # an expert without tokens
        a.params[2].grad = None
    copy_gradients(a.params, b.params)
    before = [None if p.grad is None else p.grad.clone() for p in a.params]
    for q in b.params:
        q.grad = None if q.grad is None else q.grad * FACTOR
    a.optimizer.step(gradient_factor=FACTOR)
    b.optimizer.step()
    return before


@pytest.mark.parametrize(
    ("kind", "options"), in_turn([*KINDS, *CODED_KINDS], [{}, COUPLED, {"maximize": True}])
)
def test_the_step_of_gradients_multiplied_before(kind: str, options: dict[str, Any]) -> None:
    a, b = (run_of(kind, [*SHAPES, (16,)], weight_decay=0.3, **options) for _ in range(2))
    for step in range(5):
        before = multiplied(a, b, step)
        assert_same(a, b)
        for p, grad in zip(a.params, before, strict=True):
            assert grad is None or same(p.grad, grad * FACTOR)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", [*KINDS, *CODED_KINDS])
def test_kernels_multiply_the_gradients_of_matrices_and_leave_them(kind: str) -> None:
    a, b = (run_of(kind, weight_decay=0.3) for _ in range(2))
    for step in range(5):
        before = multiplied(a, b, step)
        assert_same(a, b)
        for p, grad in zip(a.params, before, strict=True):
            is_matrix = p.dim() == 2 or (p.dim() == 3 and "per_expert" in kind)
            is_left = kind in TAKES_FACTOR and is_matrix
            assert grad is None or same(p.grad, grad if is_left else grad * FACTOR)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in FOLDING for options in ELSEWHERE),
        *((kind, {"statistics_of": "gradient"}) for kind in FOLDING if "soap" in kind),
    ],
    ids=str,
)
def test_options_that_read_gradients_elsewhere(kind: str, options: dict[str, Any]) -> None:
    a, b = (run_of(kind, weight_decay=0.3, **options) for _ in range(2))
    for step in range(5):
        before = multiplied(a, b, step)
        assert_same(a, b)
        assert same(a.params[0].grad, before[0] * FACTOR)


@pytest.mark.usefixtures("on_gpu")
def test_maximize_and_decay_that_begins_later() -> None:
    options = {"maximize": True, "weight_decay_method": "l2"}
    a, b = (run_of("muon", weight_decay=0.0, **options) for _ in range(2))
    for step in range(4):
        for group in a.groups + b.groups:
            group["weight_decay"] = 0.3 * (step > 1)
        before = multiplied(a, b, step)
        assert_same(a, b)
        assert same(a.params[0].grad, before[0] * (FACTOR if step > 1 else 1.0))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_of_unit_norms_and_gradients_that_are_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The momentum of bf16 gradients is that of gradients multiplied in fp32."""
    monkeypatch.setattr(muon, "is_gpu", lambda on: True)
    monkeypatch.setattr(muon, "iteration_dtype", lambda *of: torch.float32)
    a = run_of(Muon, [(6, 4), (3, 5)], dtype)
    momenta = [torch.zeros(p.shape) for p in a.params]
    for step in range(3):
        give_gradients(a.params, step)
        for b, p in zip(momenta, a.params, strict=True):
            nesterov_(b, p.grad.float() * FACTOR, 0.95)
        a.optimizer.step(gradient_factor=FACTOR)
    for number, b in enumerate(momenta):
        assert same(a.state(number)["momentum_buffer"], b)


@few_kinds
def test_offloaded_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "is_gpu", lambda on: True)
    a = run_of(kind, offload=True, bucket_bytes=2000)
    b = run_of(kind, bucket_bytes=2000)
    with crossing(monkeypatch) as boundary:
        for step in range(4):
            multiplied(a, b, step)
        a.optimizer.state_dict()
        assert all_same(snapshot(*a), snapshot(*b))
    assert boundary.fetched > 0


@few_kinds
def test_gradients_of_a_closure(kind: str) -> None:
    a, b = run_of(kind), run_of(kind)

    def closure() -> Tensor:
        give_gradients(a.params, 0)
        return torch.ones(())

    for _ in range(3):
        assert a.optimizer.step(closure, gradient_factor=FACTOR) == 1.0
        give_gradients(b.params, 0)
        for p in b.params:
            p.grad *= FACTOR
        b.optimizer.step()
        assert_same(a, b)


@dataclass(frozen=True)
class SignedRule(MuonRule):
    """A rule from outside that reads the gradient twice."""

    def numerator(self, g: Tensor, s: State, t: int) -> Tensor:
        return super().numerator(g, s, t) + g


@dataclass(frozen=True)
class BoundedRule(MuonRule):
    """A rule from outside that looks at the size of the gradient."""

    def decayed(self, g: Tensor, s: State) -> Tensor:
        return g.clamp(-0.1, 0.1)


@dataclass(frozen=True)
class LookingRule(SOAPMuonRule):
    """A rule from outside with statistics of the gradient."""

    def statistics(self, g: Tensor, s: State, t: int) -> None:
        for factor in s.by_dim("factor").values():
            factor.add_(g.abs().mean((1, 2))[:, None, None])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("rule", [SignedRule, BoundedRule, LookingRule])
def test_a_rule_from_outside_that_reads_gradients_elsewhere(rule: type[MuonRule]) -> None:
    a, b = (
        Run(MatrixOptimizer(params, rule(lr=0.1)), params)
        for params in (parameters(), parameters())
    )
    for step in range(3):
        multiplied(a, b, step)
        assert_same(a, b)


@pytest.mark.parametrize("cls", [SOAPMuon, Muon])
def test_norms_that_were_measured_before_are_those_without_the_factor(cls: Any) -> None:
    options = {"nonfinite": "ignore", "matrix_layout": "per_expert"}
    a, b = (run_of(cls, [(6, 4), (3, 5, 4)], **options) for _ in range(2))
    for step in range(4):
        give_gradients(a.params, step)
        a.params[1].grad[step % 3].zero_()
        copy_gradients(a.params, b.params)
        norms = a.optimizer.measure_gradients()
        a.optimizer.step(norms=norms.on_host(norms.values), gradient_factor=FACTOR)
        b.optimizer.step(gradient_factor=FACTOR)
        assert_same(a, b)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, torch.inf, torch.nan, "much", torch.ones(2)])
def test_factors_that_are_refused(value: Any) -> None:
    a = run_of(SOAPMuon)
    a.steps(range(2))
    give_gradients(a.params, 2)
    before = clones(a.params), copy.deepcopy(a.optimizer.state_dict())
    grads = [p.grad.clone() for p in a.params]
    with pytest.raises(ValueError, match=re.escape(f"gradient_factor is {value!r}")):
        a.optimizer.step(lambda: pytest.fail("called"), gradient_factor=value)
    assert all_same(a.params, before[0])
    assert all(same(p.grad, grad) for p, grad in zip(a.params, grads, strict=True))
    after = a.optimizer.state_dict()["state"]
    assert all(
        same(x, after[number][name])
        for number, entries in before[1]["state"].items()
        for name, x in entries.items()
    )


def test_gradients_that_raise_are_not_multiplied() -> None:
    a = run_of(Muon)
    give_gradients(a.params, 0)
    a.params[1].grad[0, 0, 0] = torch.nan
    grads = [p.grad.clone() for p in a.params]
    with pytest.raises(ValueError, match="not finite"):
        a.optimizer.step(gradient_factor=FACTOR)
    assert all(same(p.grad, grad) for p, grad in zip(a.params, grads, strict=True))


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), 1])
def test_numbers_of_other_libraries(value: Any) -> None:
    a, b = run_of(Muon), run_of(Muon)
    for one, factor in ((a, value), (b, float(value))):
        give_gradients(one.params, 0)
        one.optimizer.step(gradient_factor=factor)
    assert_same(a, b)


def test_a_gradient_that_nobody_can_write_raises_before_anything_changes() -> None:
    a = run_of(Muon, [(5, 4), (6, 4)])
    a.steps(range(2))
    before = snapshot(a.optimizer, a.params)
    a.params[0].grad, a.params[1].grad = torch.ones(5, 4), torch.ones(6, 1).expand(6, 4)
    with pytest.raises(ValueError, match="parameter 1 of its group has elements that share memory"):
        a.optimizer.step(gradient_factor=FACTOR)
    assert all_same(snapshot(a.optimizer, a.params), before)
    assert a.params[0].grad.eq(1).all()
