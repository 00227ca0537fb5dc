"""One optimizer with several rules: how a group names its rule, which options it takes over, and
keys that others leave in groups."""

import copy
import pickle
from typing import Any

import pytest
import torch
from optim_helpers import (
    all_same,
    clones,
    copy_gradients,
    give_gradients,
    make,
    parameter,
    parameters,
    run,
    run_both,
    same_state,
)
from strangers import Shampoo
from test_state import through_a_file
from torch import nn

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon, SOAPMuon, parameter_groups

SHAPES = [(6, 4), (3, 4, 5), (4, 6), (5,), (6, 4)]


@pytest.mark.parametrize(
    "muon",
    [
        {"rule": "muon", "momentum": 0.9},
        {"rule": Muon.rule, "momentum": 0.9},
        {"rule": Muon, "momentum": 0.9},
        {"rule": Muon.rule(momentum=0.9, lr=3e-2, weight_decay=0.2)},
        {"rule": Muon.rule(momentum=0.5, lr=3e-2, weight_decay=0.2), "momentum": 0.9},
    ],
    ids=["name", "rule", "optimizer", "instance", "instance_and_option"],
)
def test_a_group_names_its_rule(muon: dict[str, Any]) -> None:
    """The group goes on like an optimizer of that rule alone; so do the others."""
    params = parameters(SHAPES)
    others = clones(params)
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "rule": "klsoap", "matrix_layout": "per_expert"},
        {"params": params[2:3], **muon},
        {"params": params[3:4], "rule": "adamw", "betas": (0.8, 0.9)},
        {"params": params[4:5], "rule": "strangers:Shampoo", "precondition_frequency": 3},
    ]
    joint = SOAP(groups, lr=3e-2, weight_decay=0.2)
    common: dict[str, Any] = {"lr": 3e-2, "weight_decay": 0.2}
    single = [
        SOAP(others[:1], **common),
        KLSOAP(others[1:2], **common, matrix_layout="per_expert"),
        Muon(others[2:3], **common, momentum=0.9),
        AdamW(others[3:4], **common, betas=(0.8, 0.9)),
        MatrixOptimizer(others[4:5], Shampoo(**common, precondition_frequency=3)),
    ]
    assert [group["rule"] for group in joint.param_groups] == [
        "soap",
        "klsoap",
        "muon",
        "adamw",
        "strangers:Shampoo",
    ]
    for step in range(6):
        give_gradients(params, step)
        copy_gradients(params, others)
        joint.step()
        for one in single:
            one.step()
        if step == 3:
            resumed = SOAP(
                [{**group, "params": list(group["params"])} for group in groups],
                lr=3e-2,
                weight_decay=0.2,
            )
            resumed.load_state_dict(through_a_file(joint.state_dict()))
            joint = resumed
    assert all_same(params, others)
    for p, q, one in zip(params, others, single, strict=True):
        assert same_state(joint, [p], one, [q])


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_know_the_rules_of_their_groups(how: Any) -> None:
    params = parameters(SHAPES[:3])
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "rule": "soap_muon"},
        {"params": params[2:], "rule": Shampoo(1e-2)},
    ]
    optimizer = Muon(groups)
    run(optimizer, params, range(3))
    other = how(optimizer)
    others = [p for group in other.param_groups for p in group["params"]]
    run_both((optimizer, params), (other, others), range(3, 6))
    assert all_same(params, others)
    other.add_param_group({"params": [parameter(4, 4)], "rule": "klsoap"})


def test_groups_hold_plain_values() -> None:
    """A saved state has rules and dtypes by name, so that a state dict is read without the
    classes."""
    optimizer = Muon(
        [
            {"params": [parameter(4, 4)]},
            {"params": [parameter(4, 4)], "rule": Shampoo(1e-2, state_dtype=torch.bfloat16)},
        ]
    )
    for group in optimizer.state_dict()["param_groups"]:
        assert {type(value) for key, value in group.items()} <= {
            str,
            int,
            float,
            bool,
            tuple,
            list,
            dict,
            type(None),
        }
    assert optimizer.state_dict()["param_groups"][1]["state_dtype"] == "bfloat16"


def test_what_a_group_of_another_rule_takes_over_from_the_optimizer() -> None:
    """It takes over learning rate, weight decay and its method, and options of the engine; but no
    option that only looks alike, such as a layout or betas."""
    groups = [
        {"params": [parameter(4, 4, seed=seed)], "rule": rule}
        for seed, rule in enumerate(("muon", "adamw", "klsoap", "soap"))
    ]
    groups.append({"params": [parameter(3)], "rule": "adamw", "lr": 0.5, "weight_decay": 0.0})
    groups.append({"params": [parameter(4, 4)], "rule": Muon.rule()})
    given: dict[str, Any] = {
        "lr": 0.25,
        "weight_decay": 0.125,
        "weight_decay_method": "palm",
        "nonfinite": "skip",
        "max_state_bytes": 10**6,
    }
    optimizer = SOAP(
        groups,
        **given,
        state_dtype=torch.float64,
        betas=(0.5, 0.6),
        eps=1e-3,
        matrix_layout="per_expert",
    )
    muon, adamw, kl, soap, own, instance = optimizer.param_groups
    for group in (muon, adamw, kl, soap):
        assert {key: group[key] for key in given} == given
        assert group["state_dtype"] == torch.float64
    assert muon["momentum"] == 0.95
    assert muon["matrix_layout"] == kl["matrix_layout"] == "tensor"
    assert kl["betas"] == (0.9, 0.95)
    assert soap["betas"] == (0.5, 0.6)
    assert soap["matrix_layout"] == "per_expert"
    # SOAP has AdamW for its vectors, so that these are AdamW's options, too
    assert adamw["betas"] == (
        0.5,
        0.6,
    )
    assert adamw["eps"] == 1e-3
    assert (own["lr"], own["weight_decay"], own["nonfinite"]) == (0.5, 0.0, "skip")
    assert (instance["lr"], instance["weight_decay"], instance["nonfinite"]) == (
        1e-2,
        0.01,
        "raise",
    )
    assert "momentum" not in soap


def test_a_scheduler_that_turns_betas_leaves_groups_without_them_alone() -> None:
    """torch's OneCycleLR asks only the first group whether it has momentum or betas."""
    params = parameters([(4, 4), (4, 4)])
    optimizer = SOAP([{"params": params[:1]}, {"params": params[1:], "rule": "muon"}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    seen = set()
    for step in range(9):
        run(optimizer, params, range(step, step + 1))
        seen.add(
            (
                optimizer.param_groups[0]["betas"][0],
                optimizer.param_groups[1]["momentum"],
                optimizer.param_groups[1]["lr"],
            )
        )
        scheduler.step()
    assert len(seen) == 9
    assert {momentum for _, momentum, _ in seen} == {0.95}


def test_rules_that_are_not_known() -> None:
    for name, problem in (
        ("moun", "give one of"),
        ("strangers:Adam", "module:Class"),
        ("nowhere:Rule", "module:Class"),
    ):
        with pytest.raises(ValueError, match=f"rule '{name}' is not known.*{problem}"):
            SOAP([{"params": [parameter(2, 2)], "rule": name}])
    with pytest.raises(ValueError, match=r"not a subclass of lather\.optim\.Rule"):
        SOAP([{"params": [parameter(2, 2)], "rule": "strangers:torch"}])
    for rule in (torch.optim.AdamW, dict, 3):
        with pytest.raises(
            TypeError,
            match=(
                r"rule=.* of a parameter group is not valid: give a "
                r"rule's name, its class, or an instance"
            ),
        ):
            SOAP([{"params": [parameter(2, 2)], "rule": rule}])


def test_options_of_another_rule_are_checked_by_that_rule() -> None:
    with pytest.raises(ValueError, match=r"momentum=1\.5 is not valid"):
        SOAP([{"params": [parameter(2, 2)], "rule": "muon", "momentum": 1.5}])
    with pytest.raises(ValueError, match=r"eigenvalue_flor.*did you mean 'eigenvalue_floor'"):
        SOAP([{"params": [parameter(2, 2)], "rule": "klsoap", "eigenvalue_flor": 1.0}])


# --- a good guest ---------------------------------------------------------------------------------

OF_OTHERS = {
    "foreach": None,
    "fused": False,
    "capturable": True,
    "amsgrad": False,
    "lr_scale": 0.3,
    "lr_mult": 2.0,
    "weight_decay_mult": 0.0,
    "weight_decay_scale": 1.0,
    "group_name": "decay",
    "is_expert": True,
    "layer_id": 3,
    "initial_lr": 0.1,
    "swa_lr": 0.05,
    "differentiable": False,
    "decoupled_weight_decay": True,
    "kind": "decay",
    "optimizer": "auto",
}
"""Keys that torchtitan, timm and others leave in groups."""


@pytest.mark.parametrize(
    "kind", ["soap", "kl_soap", "stacked_soap", "muon", "soap_muon", "adamw", "shampoo", "lion"]
)
def test_keys_of_others_are_kept_and_ignored(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    params = parameters([(6, 4), (4, 6)])
    others = clones(params)
    optimizer, plain = make(kind, params), make(kind, others)
    group = optimizer.param_groups.pop()
    rule_and_options = {
        key: value for key, value in group.items() if key not in ("params", "param_names")
    }
    optimizer.add_param_group({"params": params, **rule_and_options, **OF_OTHERS})
    run_both((optimizer, params), (plain, others), range(4))
    assert all_same(params, others)
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]
    saved = optimizer.state_dict()["param_groups"][0]
    assert {key: saved[key] for key in OF_OTHERS} == OF_OTHERS
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.param_groups[0]["lr_scale"] = 7.0
    run_both((optimizer, params), (plain, others), range(4, 6))
    assert all_same(params, others)
    assert optimizer.param_groups[0]["lr_scale"] == 7.0


@pytest.mark.parametrize(
    ("cls", "key", "meant"),
    [
        (SOAP, "learning_rate", "lr"),
        (Muon, "learning_rate", "lr"),
        (AdamW, "wd", "weight_decay"),
        (Muon, "momentun", "momentum"),
        (Muon, "weightdecay", "weight_decay"),
        (SOAPMuon, "muon_warmup_step", "muon_warmup_steps"),
        (SOAP, "precondition_frequence", "precondition_frequency"),
        (KLSOAP, "eigenvalues_floor", "eigenvalue_floor"),
        (Muon, "newton_schulz_type", "newton_schulz_dtype"),
        (AdamW, "keep_norms", "keep_norm"),
    ],
)
def test_near_misses_are_refused(cls: Any, key: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=f"unknown option '{key}' in a parameter group: did you mean '{meant}'"
    ):
        cls([{"params": [parameter(2, 2)], key: 0.1}], lr=1e-3)


# --- frozen and thawed ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["soap", "kl_soap", "soap_muon", "muon", "adamw", "shampoo"])
def test_frozen_parameters_are_stepped_once_they_have_gradients(kind: str) -> None:
    params = parameters([(6, 4), (6, 4), (5,)])
    alone = clones(params[1:])
    for p in params[1:]:
        p.requires_grad_(False)
    optimizer, single = make(kind, params), make(kind, alone)
    run(optimizer, params[:1], range(3))
    # the state of parameters without any
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, params[:1], range(3, 5))
    assert all_same(params[1:], alone)
    assert not any(optimizer.state.get(p) for p in params[1:])
    for p in params[1:]:
        p.requires_grad_(True)
    for step in range(5, 10):
        give_gradients(params, step)
        copy_gradients(params[1:], alone)
        optimizer.step()
        single.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [10, 5, 5]
    for p, q in zip(params[1:], alone, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["soap", "muon", "shampoo"])
def test_parameters_frozen_again_keep_their_state(kind: str) -> None:
    params = parameters([(6, 4), (6, 4)])
    optimizer = make(kind, params)
    run(optimizer, params, range(2))
    params[1].requires_grad_(False)
    params[1].grad, before = None, {key: x.clone() for key, x in optimizer.state[params[1]].items()}
    for step in range(2, 4):
        give_gradients(params[:1], step)
        optimizer.step()
    others = clones(params)
    others[1].requires_grad_(False)
    resumed = make(kind, others)  # in this optimizer it has been frozen from the beginning
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same_state(optimizer, params, resumed, others)
    assert all(torch.equal(x, optimizer.state[params[1]][key]) for key, x in before.items())
    for one in (params[1], others[1]):
        one.requires_grad_(True)
    run_both((optimizer, params), (resumed, others), range(4, 7))
    assert all_same(params, others)
    assert int(resumed.state[others[1]]["step"]) == 5


def test_groups_of_a_model_hold_what_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    optimizer = Muon(parameter_groups(model), lr=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    for thawed in (False, True):
        model[0].requires_grad_(thawed)
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        moved = [not torch.equal(p, w) for p, w in zip(model.parameters(), start, strict=True)]
        assert moved == [thawed, thawed, True, True]
