"""The state of an optimizer: exact when saved and loaded, refused when it does not fit, made on
request."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    KINDS,
    all_same,
    clones,
    give_gradients,
    make,
    parameter,
    parameters,
    run,
    run_both,
    same,
    same_state,
)

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, StackedSOAP
from lather.optim.schedules import LinearFrequency

every_kind = pytest.mark.parametrize("kind", KINDS)


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in KINDS), *((kind, torch.bfloat16) for kind in FEW_KINDS)],
    ids=str,
)
def test_state_is_exact_when_saved_and_loaded_at_any_time(kind: str, dtype: torch.dtype) -> None:
    """It is saved before the first step, after it, in mid-interval, and after a refresh; the steps
    that follow are the same to the bit."""
    params = parameters([(5, 6), (2, 4, 3), (6,), ()], dtype)
    optimizer = make(kind, params)
    for step in range(7):
        if step in (0, 1, 3, 6):
            others = clones(params)
            resumed = make(kind, others)
            resumed.load_state_dict(through_a_file(optimizer.state_dict()))
            assert same_state(optimizer, params, resumed, others)
            assert {value.dtype for p in others for value in resumed.state.get(p, {}).values()} <= {
                torch.float32
            }
            carried_on, its_params = copy.deepcopy((optimizer, params))
            run_both((carried_on, its_params), (resumed, others), range(step, step + 2))
            assert all_same(its_params, others)
            assert same_state(carried_on, its_params, resumed, others)
        give_gradients(params, step)
        optimizer.step()


STATE_DTYPES = {
    "bf16": torch.bfloat16,
    "bf16_moments": {"moments": torch.bfloat16},
    "bf16_bases": {"bases": torch.bfloat16},
    "fp64": torch.float64,
}


@pytest.mark.parametrize("state_dtype", STATE_DTYPES.values(), ids=STATE_DTYPES.keys())
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_state_of_other_dtypes_is_exact_too(kind: str, state_dtype: Any) -> None:
    params = parameters([(5, 6), (2, 4, 3), (6,)])
    optimizer = make(kind, params, state_dtype=state_dtype)
    run(optimizer, params, range(4))
    others = clones(params)
    resumed = make(kind, others)  # the saved groups name the dtype
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same_state(optimizer, params, resumed, others)
    run_both((optimizer, params), (resumed, others), range(4, 7))
    assert all_same(params, others)
    moments, bases = (
        (state_dtype.get("moments", torch.float32), state_dtype.get("bases", torch.float32))
        if isinstance(state_dtype, dict)
        else (state_dtype, state_dtype)
    )
    wide = torch.float64 if state_dtype is torch.float64 else torch.float32
    for name, value in optimizer.state[params[0]].items():
        expected = (
            moments
            if name.startswith(("exp_avg", "momentum_buffer"))
            else bases
            if name.startswith(("basis", "root"))
            else wide
        )
        assert value.dtype == (torch.float32 if name == "step" else expected), name


@pytest.mark.parametrize("state_dtype", ["bf16", "bf16_moments", "bf16_bases"])
@pytest.mark.parametrize("kind", ["soap", "kl_soap"])
def test_narrow_state_stays_near_the_wide_one(kind: str, state_dtype: str) -> None:
    narrow, wide, still = parameters([(8, 8)]), parameters([(8, 8)]), parameters([(8, 8)])
    options = {"second_moment": "rotate", "weight_decay": 0.0, "lr": 1e-2, "betas": (0.9, 0.95)}
    a = make(kind, narrow, state_dtype=STATE_DTYPES[state_dtype], **options)
    run_both((a, narrow), (make(kind, wide, **options), wide), range(12))
    moved = (wide[0] - still[0]).norm()
    assert 0 < (narrow[0] - wide[0]).norm() < 0.1 * moved


def test_a_schedule_of_refreshes_is_not_saved_and_the_loader_keeps_its_own() -> None:
    schedule = LinearFrequency(1, 4, 6)
    params = parameters()
    optimizer = make("soap", params, precondition_frequency=schedule)
    run(optimizer, params, range(4))
    saved = through_a_file(optimizer.state_dict())
    assert not any(callable(value) for group in saved["param_groups"] for value in group.values())
    others = clones(params)
    resumed = make("soap", others, precondition_frequency=schedule)
    resumed.load_state_dict(saved)
    assert [group["precondition_frequency"] for group in resumed.param_groups] == [
        schedule,
        schedule,
    ]
    run_both((optimizer, params), (resumed, others), range(4, 9))
    assert all_same(params, others)


def test_the_loader_keeps_its_own_interval_of_each_group_where_none_is_saved() -> None:
    optimizer = SOAP([parameter(4, 4)], precondition_frequency=LinearFrequency(1, 4, 6))
    resumed = SOAP([{"params": [parameter(4, 4)], "precondition_frequency": 3}])
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["precondition_frequency"] == 3


def test_loaded_state_is_a_copy() -> None:
    p, q = parameter(4, 4), parameter(4, 4)
    first, second = SOAP([p]), SOAP([q])
    run(first, [p], range(2))
    second.load_state_dict(first.state_dict())
    before = first.state[p]["exp_avg"].clone()
    run(second, [q], range(2, 4))
    assert same(first.state[p]["exp_avg"], before)


ADAM = "exp_avg exp_avg_sq"
BOTH_SIDES = "factor_0 factor_1 basis_0 basis_1"
KEYS = {
    **dict.fromkeys(
        ["soap", "soap_per_expert", "soap_stacked", "soap_orthogonalized"], f"{ADAM} {BOTH_SIDES}"
    ),
    "soap_own_momentum_per_expert": f"momentum_buffer exp_avg_sq {BOTH_SIDES}",
    "soap_one_sided": f"{ADAM} factor_1 basis_1",
    **dict.fromkeys(
        ["kl_soap", "kl_soap_per_expert", "kl_soap_floor", "rekls", "stacked_soap"],
        f"{ADAM} {BOTH_SIDES} eigenvalues_0 eigenvalues_1",
    ),
    "muon": "momentum_buffer",
    "muon_per_expert": "momentum_buffer row_moment",
    "muon_stacked": "momentum_buffer norm",
    "soap_muon": "momentum_buffer exp_avg_sq factor_1 basis_1",
    "soap_muon_per_expert": f"momentum_buffer exp_avg_sq {BOTH_SIDES}",
    "adamw": ADAM,
    **dict.fromkeys(
        ["shampoo", "shampoo_per_expert", "shampoo_stacked"],
        "exp_avg factor_0 factor_1 root_0 root_1",
    ),
    **dict.fromkeys(["lion", "lion_per_expert"], "exp_avg"),
}
"""State keys of a matrix (6, 4)."""


@every_kind
def test_init_state_makes_the_keys_that_the_first_step_makes_and_changes_nothing(kind: str) -> None:
    params = parameters()
    others = clones(params)
    prepared, plain = make(kind, params), make(kind, others)
    prepared.init_state()
    assert prepared.state[params[0]].keys() == {"step", *KEYS[kind].split()}
    assert prepared.state[params[3]].keys() == {
        "step",
        "exp_avg",
        *([] if kind.startswith(("shampoo", "lion")) else ["exp_avg_sq"]),
    }
    assert all(int(prepared.state[p]["step"]) == 0 for p in params)
    for p in (params[0], params[2]):
        for name in [name for name in prepared.state[p] if name.startswith(("basis", "root"))]:
            assert torch.equal(prepared.state[p][name], torch.eye(p.shape[int(name[-1])]))
    run_both((prepared, params), (plain, others), range(3))
    assert same_state(prepared, params, plain, others)
    assert all_same(params, others)


def test_hooks_around_loading_see_and_change_what_is_loaded() -> None:
    a, b = parameter(3, 4), parameter(5, 6)
    saved = SOAP([("a", a), ("b", b)])
    run(saved, [a, b], range(3))
    loaded = SOAP([("b", b), ("a", a)])

    def by_name(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load what was saved as a, b in the order b, a."""
        state_dict["state"] = {0: state_dict["state"][1], 1: state_dict["state"][0]}
        return state_dict

    def double(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[a]["exp_avg"].mul_(2)

    loaded.register_load_state_dict_pre_hook(by_name)
    loaded.register_load_state_dict_post_hook(double)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.state[b]["exp_avg"], saved.state[b]["exp_avg"])
    assert torch.equal(loaded.state[a]["exp_avg"], 2 * saved.state[a]["exp_avg"])


# --- states that do not fit -----------------------------------------------------------------------


def trained(cls: type[MatrixOptimizer], *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    params = parameters(shapes)
    optimizer = cls(params, lr=1e-2, **options)
    run(optimizer, params, range(2))
    return optimizer.state_dict()


def without(key: str) -> dict[str, Any]:
    saved = trained(SOAP, (4, 6), (5, 5))
    return {
        **saved,
        "state": {
            i: {name: x for name, x in state.items() if name != key}
            for i, state in saved["state"].items()
        },
    }


def with_a_number_for_a_tensor() -> dict[str, Any]:
    saved = trained(SOAP, (4, 6), (5, 5))
    return {**saved, "state": {i: {**state, "exp_avg": 1.0} for i, state in saved["state"].items()}}


def of_adamw() -> dict[str, Any]:
    params = parameters([(4, 6), (5, 5)])
    optimizer = torch.optim.AdamW(params)
    run(optimizer, params, range(2))
    return optimizer.state_dict()


def of_two_groups() -> dict[str, Any]:
    p, q = parameters([(4, 6), (5, 5)])
    return SOAP([{"params": [p]}, {"params": [q]}]).state_dict()


MISFITS: dict[str, Callable[[], dict[str, Any]]] = {
    "transposed": lambda: trained(SOAP, (6, 4), (5, 5)),
    "larger": lambda: trained(SOAP, (4, 6), (5, 6)),
    "more_dims": lambda: trained(SOAP, (4, 6), (1, 5, 5)),
    "one_more": lambda: trained(SOAP, (4, 6), (5, 5), (3, 3)),
    "two_groups": of_two_groups,
    "no_step": lambda: without("step"),
    "no_basis": lambda: without("basis_1"),
    "no_moment": lambda: without("exp_avg"),
    "a_number": with_a_number_for_a_tensor,
    "adamw": of_adamw,
    "kl_soap": lambda: trained(KLSOAP, (4, 6), (5, 5)),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(misfit: str) -> None:
    params = parameters([(4, 6), (5, 5)])
    optimizer = SOAP(params, precondition_frequency=7)
    run(optimizer, params, range(3))
    twin = copy.deepcopy(optimizer)
    twins = twin.param_groups[0]["params"]
    with pytest.raises(ValueError, match=r"saved"):
        optimizer.load_state_dict(MISFITS[misfit]())
    assert optimizer.param_groups[0]["precondition_frequency"] == 7
    assert same_state(optimizer, params, twin, twins)
    run_both((optimizer, params), (twin, twins), range(3, 5))
    assert all_same(params, twins)


def test_a_misfit_of_kl_soap_and_of_a_layout() -> None:
    with pytest.raises(ValueError, match="saved group 0 has rule 'soap'"):
        KLSOAP(parameters([(4, 6)]), 1e-2).load_state_dict(trained(SOAP, (4, 6)))
    saved = trained(StackedSOAP, (2, 4, 6))
    saved["param_groups"][0]["matrix_layout"] = "per_expert"
    with pytest.raises(ValueError, match="'per_expert' is not valid for StackedSOAP"):
        StackedSOAP(parameters([(2, 4, 6)]), 1e-2).load_state_dict(saved)
    del saved["param_groups"][0]["rule"]  # as a release without this key saved it
    with pytest.raises(ValueError, match=r"exp_avg \(8, 6\), expected \(2, 4, 6\)"):
        KLSOAP(parameters([(2, 4, 6)]), 1e-2).load_state_dict(saved)


def test_state_of_another_rule_is_refused_even_if_it_fits() -> None:
    with pytest.raises(
        ValueError, match=r"saved group 0 has rule 'soap', this optimizer's has 'adamw'"
    ):
        AdamW(parameters([(4,)])).load_state_dict(trained(SOAP, (4,)))
