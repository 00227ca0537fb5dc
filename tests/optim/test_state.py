"""The state of an optimizer: exact when saved and loaded, and made on request. (States that do not
fit are in `mistakes.txt`.)"""

import copy
import pickle
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    KINDS,
    Run,
    all_same,
    assert_same,
    copied,
    every_kind,
    parameter,
    parameters,
    run_both,
    run_of,
    same,
    through_a_file,
)

from in_turn import in_turn
from lather.optim import SOAP
from lather.optim.schedules import LinearFrequency

SHAPES = [(5, 6), (2, 4, 3), (6,), ()]


def resumed(a: Run, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Run:
    """Make a second optimizer that goes on from the weights and the saved state of the first."""
    b = run_of(kind, SHAPES, dtype, **options)
    for p, q in zip(a.params, b.params, strict=True):
        q.data.copy_(p.data)
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    return b


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in KINDS), *((kind, torch.bfloat16) for kind in FEW_KINDS)],
    ids=str,
)
def test_state_is_exact_when_saved_and_loaded_at_any_time(kind: str, dtype: torch.dtype) -> None:
    """It is saved before the first step, after it, in mid-interval, and after a refresh; the steps
    that follow are the same to the bit."""
    a = run_of(kind, SHAPES, dtype)
    for step in range(7):
        if step in (0, 1, 3, 6):
            b = resumed(a, kind, dtype)
            assert_same(a, b)
            states = [b.optimizer.state.get(p, {}) for p in b.params]
            assert {x.dtype for state in states for x in state.values()} <= {torch.float32}
            carried_on = copied(a, copy.deepcopy)
            run_both(carried_on, b, range(step, step + 2))
            assert_same(carried_on, b)
        a.steps([step])


BF16 = torch.bfloat16
STATE_DTYPES = {
    "bf16": (BF16, BF16, BF16, torch.float32),
    "bf16_moments": ({"moments": BF16}, BF16, torch.float32, torch.float32),
    "bf16_bases": ({"bases": BF16}, torch.float32, BF16, torch.float32),
    "fp64": (torch.float64,) * 4,
}
"""`state_dtype`, with the dtypes of moments, bases and statistics."""


@pytest.mark.parametrize(("kind", "name"), in_turn(FEW_KINDS, STATE_DTYPES))
def test_state_of_other_dtypes_is_exact_too(kind: str, name: str) -> None:
    state_dtype, moments, bases, wide = STATE_DTYPES[name]
    a = run_of(kind, SHAPES, state_dtype=state_dtype)
    a.steps(range(4))
    b = resumed(a, kind)  # the saved groups name the dtype
    assert_same(a, b)
    run_both(a, b, range(4, 7))
    assert_same(a, b)
    for entry, x in a.state(0).items():
        is_moment, is_basis = (
            entry.startswith(names) for names in (("exp_avg", "mom"), ("basis", "root"))
        )
        expected = moments if is_moment else bases if is_basis else wide
        assert x.dtype == (torch.float32 if entry == "step" else expected), entry


@pytest.mark.parametrize("name", ["bf16", "bf16_moments", "bf16_bases"])
@pytest.mark.parametrize("kind", ["soap", "kl_soap"])
def test_narrow_state_stays_near_the_wide_one(kind: str, name: str) -> None:
    options = {"second_moment": "rotate", "weight_decay": 0.0, "betas": (0.9, 0.95)}
    a = run_of(kind, [(8, 8)], state_dtype=STATE_DTYPES[name][0], **options)
    b, (start,) = run_of(kind, [(8, 8)], **options), parameters([(8, 8)])
    run_both(a, b, range(12))
    difference = (a.params[0] - b.params[0]).norm()
    assert 0 < difference < 0.1 * (b.params[0] - start).norm()


def test_a_schedule_of_refreshes_is_not_saved_and_the_loader_keeps_its_own() -> None:
    schedule = LinearFrequency(1, 4, 6)
    a = run_of("soap", SHAPES, precondition_frequency=schedule)
    a.steps(range(4))
    saved = through_a_file(a.optimizer.state_dict())
    assert not any(callable(value) for group in saved["param_groups"] for value in group.values())
    b = resumed(a, "soap", precondition_frequency=schedule)
    assert [group["precondition_frequency"] for group in b.groups] == [schedule, schedule]
    run_both(a, b, range(4, 9))
    assert all_same(a.params, b.params)
    assert resumed(a, "soap", precondition_frequency=3).groups[0]["precondition_frequency"] == 3
    a = run_of("soap", SHAPES, precondition_frequency=2)
    own = resumed(a, "soap", precondition_frequency=schedule).groups[0]
    assert own["precondition_frequency"] is schedule


def test_loaded_state_is_a_copy() -> None:
    a, b = run_of(SOAP, [(4, 4)]), run_of(SOAP, [(4, 4)])
    a.steps(range(2))
    b.optimizer.load_state_dict(a.optimizer.state_dict())
    before = {name: x.clone() for name, x in a.state(0).items()}
    b.steps(range(2, 4))
    assert all(same(x, before[name]) for name, x in a.state(0).items())


def test_a_copy_has_what_others_keep_in_the_state_beside_the_parameters() -> None:
    a = run_of(SOAP, [(4, 4)])
    a.steps(range(2))
    state: Any = a.optimizer.state
    state["num_batches"] = 3
    copies: list[Any] = [copy.deepcopy(a.optimizer)]
    copies.append(pickle.loads(pickle.dumps(a.optimizer)))
    assert [optimizer.state["num_batches"] for optimizer in copies] == [3, 3]


ADAM = "exp_avg exp_avg_sq"
BOTH_SIDES = "factor_0 factor_1 basis_0 basis_1"
KEYS = {
    "soap": f"{ADAM} {BOTH_SIDES}",
    "soap_own_momentum_per_expert": f"momentum_buffer exp_avg_sq {BOTH_SIDES}",
    "soap_one_sided": f"{ADAM} factor_1 basis_1",
    **dict.fromkeys(
        ("kl_soap", "rekls", "stacked_soap"), f"{ADAM} {BOTH_SIDES} eigenvalues_0 eigenvalues_1"
    ),
    "muon": "momentum_buffer",
    "muon_per_expert": "momentum_buffer momentum_gap row_moment",
    "muon_stacked": "momentum_buffer momentum_gap norm",
    "muon_per_head": "momentum_buffer row_moment norm",
    "soap_muon": "momentum_buffer exp_avg_sq factor_1 basis_1",
    "soap_muon_per_expert": f"momentum_buffer exp_avg_sq {BOTH_SIDES}",
    "adamw": ADAM,
    "grafted_shampoo": f"{ADAM} factor_0 factor_1 root_0 root_1",
    "grafted_shampoo_per_expert": "exp_avg factor_1 root_1",
    "psgd_kron": "momentum_buffer factor_0 factor_1 curvature_0 curvature_1",
    "psgd_kron_per_expert": "momentum_buffer factor_1 curvature_1",
    "adamuon": "momentum_buffer exp_avg_sq",
    "scion": "momentum_buffer",
    "shampoo": "exp_avg factor_0 factor_1 root_0 root_1",
    "lion": "exp_avg",
}
"""State keys of a matrix (6, 4), by the longest beginning of a kind's name."""


@every_kind
def test_init_state_makes_the_keys_that_the_first_step_makes_and_changes_nothing(kind: str) -> None:
    a, b = run_of(kind), run_of(kind)
    a.optimizer.init_state()
    keys = KEYS[max((name for name in KEYS if kind.startswith(name)), key=len)]
    assert a.state(0).keys() == {"step", *keys.split()}
    of_vector = {"exp_avg"} if kind.startswith(("shampoo", "lion")) else set(ADAM.split())
    assert a.state(3).keys() == {"step", *of_vector}
    assert all(int(a.state(i)["step"]) == 0 for i in range(len(a.params)))
    for i in (0, 2):
        for name in [name for name in a.state(i) if name.startswith(("basis", "root"))]:
            has_heads = kind == "soap_per_head" and name[-1] == "0"
            eye = torch.eye(2 if has_heads else a.params[i].shape[int(name[-1])])
            assert torch.equal(a.state(i)[name], eye.expand_as(a.state(i)[name]))
    run_both(a, b, range(3))
    assert_same(a, b)


def test_hooks_around_loading_see_and_change_what_is_loaded() -> None:
    p, q = parameter(3, 4), parameter(5, 6)
    saved, loaded = (
        Run(SOAP(pairs), [p, q]) for pairs in ([("p", p), ("q", q)], [("q", q), ("p", p)])
    )
    saved.steps(range(3))

    def by_name(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load what was saved as p, q in the order q, p."""
        state_dict["state"] = {0: state_dict["state"][1], 1: state_dict["state"][0]}
        return state_dict

    def double(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[p]["exp_avg"].mul_(2)

    loaded.optimizer.register_load_state_dict_pre_hook(by_name)
    loaded.optimizer.register_load_state_dict_post_hook(double)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert torch.equal(loaded.state(1)["exp_avg"], saved.state(1)["exp_avg"])
    assert torch.equal(loaded.state(0)["exp_avg"], 2 * saved.state(0)["exp_avg"])


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7.0, dtype=torch.float64)], ids=repr)
def test_a_step_may_be_a_number_in_a_saved_state_and_in_the_state(step: Any) -> None:
    a, b = run_of(SOAP, [(3, 4)]), run_of(SOAP, [(3, 4)])
    a.steps(range(3))
    saved = a.optimizer.state_dict()
    saved["state"][0]["step"] = step
    b.optimizer.load_state_dict(saved)
    a.state(0)["step"] = step
    for one in (a, b):
        one.steps(range(1))
        assert int(one.state(0)["step"]) == 8
