"""Gradients that are not finite, and failures in mid-step: nothing changes that need not change.
(What is refused with which words is in `mistakes.txt`.)"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import (
    FEW_SOAP_KINDS,
    KINDS,
    Run,
    every_kind,
    give_gradients,
    make,
    parameter,
    parameters,
    run,
    run_of,
    same,
    snapshot,
)

from in_turn import in_turn
from lather.optim import SOAP, Muon
from lather.optim.batched import formats, optimizer, plan, state_store
from lather.optim.rules import bases, kl_soap, soap, soap_muon


def with_a_bad_gradient(kind: str, value: float, **options: Any) -> Run:
    """Take three steps of three equal parameters, and then put a number that is not finite, or
    whose square is not, into the second one's gradient."""
    a = run_of(kind, [(3, 4, 4)] * 3, precondition_frequency=1, **options)
    a.steps(range(3))
    give_gradients(a.params, 3)
    a.params[1].grad[0, 0, 0] = value
    return a


@pytest.mark.parametrize(
    ("kind", "value"), in_turn(KINDS, [torch.nan, torch.inf, -torch.inf, 1e20]), ids=str
)
def test_a_gradient_that_is_not_finite_is_refused_or_passed_over_and_counted(
    kind: str, value: float
) -> None:
    """A square that is not finite counts, too: it would make second moments and factors infinite
    for ever."""
    a = with_a_bad_gradient(kind, value)
    before = snapshot(a.optimizer, a.params)
    with pytest.raises(ValueError, match="parameter 1 of its group is not finite"):
        a.optimizer.step()
    assert all(map(same, before, snapshot(a.optimizer, a.params)))
    for group in a.groups:
        group["nonfinite"] = "skip"
    state = {name: x.clone() for name, x in a.state(1).items()}
    a.optimizer.step()
    moved = [not same(p.detach(), start) for p, start in zip(a.params, before, strict=False)]
    assert moved == [True, False, True]
    assert all(same(x, state[name]) for name, x in a.state(1).items())
    assert a.optimizer.counters["nonfinite_skipped"] == 1
    a.params[0].grad.fill_(torch.nan)
    a.optimizer.step()
    assert a.optimizer.counters["nonfinite_skipped"] == 3
    a.steps(range(4, 6))
    assert [int(a.state(i)["step"]) for i in range(3)] == [6, 5, 7]
    assert all(p.isfinite().all() for p in a.params)


@every_kind
def test_a_gradient_of_1e18_is_accepted(kind: str) -> None:
    a = run_of(kind, [(4, 4), (2, 4, 4)], weight_decay=0.0)
    for p in a.params:
        p.grad = torch.full_like(p, 1e18)
    a.optimizer.step()
    assert all(p.isfinite().all() for p in a.params)


@pytest.mark.parametrize("kind", [*FEW_SOAP_KINDS, "muon_per_expert", "soap_muon", "adamw"])
def test_nonfinite_ignore_lets_it_through(kind: str) -> None:
    a = with_a_bad_gradient(kind, torch.nan, nonfinite="ignore")
    a.optimizer.step()
    assert a.params[1].isnan().any()
    assert a.params[0].isfinite().all()
    assert a.optimizer.counters["nonfinite_skipped"] == 0


def test_factors_that_overflow_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    a = run_of(SOAP, [(4, 6)], precondition_frequency=1, nonfinite="ignore")
    a.steps(range(2))
    basis = a.state(0)["basis_0"].clone()
    a.params[0].grad = torch.full((4, 6), 1e25)
    a.optimizer.step()
    assert a.optimizer.counters["refreshes_failed"] == 2
    assert all(text in caplog.text for text in ("4 x 4", "6 x 6"))
    assert same(a.state(0)["basis_0"], basis)


def test_decay_rates_that_bf16_state_can_carry_out_are_taken() -> None:
    params = [parameter(2, 2)]
    SOAP(params, betas=(0.9, 1 - 2**-8), state_dtype=torch.bfloat16)
    SOAP(params, betas=(0.9, 0.999), state_dtype={"bases": torch.bfloat16})
    Muon(params, normalize="row", beta2=0.999, state_dtype=torch.bfloat16)


def test_published_arguments_of_soap_become_options() -> None:
    """They may be given to the constructor and in groups, and are in no group afterwards."""
    p, q, r = (parameter(2, 2) for _ in range(3))
    plain = {"params": [q], "use_eigh": False, "use_decoupled_weight_decay": True}
    own = {"params": [r], "weight_decay_method": "palm", "use_decoupled_weight_decay": np.True_}
    opt = SOAP([{"params": [p]}, plain, own], use_eigh=True, use_decoupled_weight_decay=False)
    options = [(one["refresh_method"], one["weight_decay_method"]) for one in opt.param_groups]
    assert options == [("eigh", "l2"), ("auto", "decoupled"), ("eigh", "palm")]
    assert not {"use_eigh", "use_decoupled_weight_decay"} & set().union(*opt.param_groups)
    opt.param_groups[0]["use_eigh"] = True
    run(opt, [p], range(1))


@pytest.mark.parametrize(
    ("adam", "precondition", "expected"),
    [(0, 0, 1), (-3, 0, 1), (5, 0, 5), (5, 5, 4), (9, 3, 2), (4, 1, 1), (2, 6, 2)],
)
def test_warm_ups_are_brought_into_order_and_logged(
    adam: int, precondition: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"adam_warmup_steps": adam, "precondition_warmup_steps": precondition}
    with caplog.at_level(logging.INFO, logger="lather"):
        a = run_of(SOAP, [(2, 2)], **options)
    assert a.groups[0]["adam_warmup_steps"] == expected
    assert ("adam_warmup_steps" in caplog.text) == (adam != expected)


# --- failures in mid-step -------------------------------------------------------------------------

FAULTS: dict[str, list[tuple[Any, str]]] = {
    "inspect": [(optimizer, "inspect_gradients")],
    "buckets": [(state_store, "make_buckets")],
    "allocation": [(formats.EntryFormat, "initialize")],
    "statistics": [
        (soap, "update_kronecker_factors"),
        (kl_soap, "update_kronecker_factors_kl"),
        (soap_muon, "update_kronecker_factors"),
    ],
    "adam": [
        (soap, "adam_in_basis"),
        (kl_soap, "adam_in_basis"),
        (soap_muon.MuonRule, "numerator"),
    ],
    "precondition": [(rules, "precondition") for rules in (soap, kl_soap, soap_muon)],
    "refresh": [(bases, "update_eigenbasis_and_momentum")],
    "gather": [(plan.Chunk, "gradients")],
    "change": [(plan, "change_weights")],
    "store": [(formats.Rows, "store")],
}


class InjectedError(Exception):
    pass


@pytest.mark.parametrize("call", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("phase", FAULTS)
@pytest.mark.parametrize("kind", ["soap_stacked", "kl_soap_per_expert", "soap_muon_per_expert"])
def test_an_exception_in_any_phase_leaves_parameters_and_gradients_in_shape(
    kind: str, phase: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters([(3, 4, 5), (3, 5, 4), (5,)], torch.bfloat16 if call else torch.float32)
    params.append(torch.nn.Parameter(parameter(4, 7).detach().T))
    optimizer = make(kind, params, precondition_frequency=1, maximize=bool(call))
    run(optimizer, params, range(0 if phase in ("buckets", "allocation") else 2))
    give_gradients(params, 3)

    def form(p: torch.nn.Parameter) -> tuple[object, ...]:
        return p.shape, p.data_ptr(), p.stride(), p.requires_grad, p.dtype, id(p.grad)

    before, grads, calls = list(map(form, params)), [p.grad.clone() for p in params], 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > call:
                raise InjectedError
            return original(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for owner, name in FAULTS[phase]:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        if call and phase in ("inspect", "buckets"):
            optimizer.step()  # this is called once in a step
            assert calls == 1
            return
        with pytest.raises(InjectedError):
            optimizer.step()
    assert list(map(form, params)) == before
    assert all(map(same, (p.grad for p in params), grads))
    assert all(p.isfinite().all() for p in params)
    run(optimizer, params, range(4, 5))
    assert all(p.isfinite().all() for p in params)
