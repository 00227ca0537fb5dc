"""One optimizer with several rules: how a group names its rule, which options it takes over, and
parameters that are frozen and thawed."""

import copy
import pickle
from typing import Any

import pytest
import torch
from optim_helpers import (
    Run,
    all_same,
    clones,
    copied,
    copy_gradients,
    give_gradients,
    parameter,
    parameters,
    run,
    run_both,
    run_of,
    same_state,
    through_a_file,
)
from strangers import Shampoo
from torch import nn

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon, parameter_groups

SHAPES = [(6, 4), (3, 4, 5), (4, 6), (5,), (6, 4)]


def with_rules(cls: Any, params: list[nn.Parameter], *rules: dict[str, Any], **options: Any) -> Any:
    """Make an optimizer of a group for each parameter."""
    groups = [{"params": [p], **rule} for p, rule in zip(params, rules, strict=True)]
    return cls(groups, **options)


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
    params, others = parameters(SHAPES), parameters(SHAPES)
    common: dict[str, Any] = {"lr": 3e-2, "weight_decay": 0.2}
    rules: list[dict[str, Any]] = [
        *({}, {"rule": "klsoap", "matrix_layout": "per_expert"}, muon),
        {"rule": "adamw", "betas": (0.8, 0.9)},
        {"rule": "strangers:Shampoo", "precondition_frequency": 3},
    ]
    joint = with_rules(SOAP, params, *rules, **common)
    single = [
        SOAP(others[:1], **common),
        KLSOAP(others[1:2], **common, matrix_layout="per_expert"),
        Muon(others[2:3], **common, momentum=0.9),
        AdamW(others[3:4], **common, betas=(0.8, 0.9)),
        MatrixOptimizer(others[4:5], Shampoo(**common, precondition_frequency=3)),
    ]
    names = [group["rule"] for group in joint.param_groups]
    assert names == ["soap", "klsoap", "muon", "adamw", "strangers:Shampoo"]
    for step in range(6):
        give_gradients(params, step)
        copy_gradients(params, others)
        joint.step()
        for one in single:
            one.step()
        if step == 3:
            saved = through_a_file(joint.state_dict())
            joint = with_rules(SOAP, params, *rules, **common)
            joint.load_state_dict(saved)
    assert all_same(params, others)
    for p, q, one in zip(params, others, single, strict=True):
        assert same_state(joint, [p], one, [q])


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_know_the_rules_of_their_groups(how: Any) -> None:
    params = parameters(SHAPES[:3])
    a = Run(with_rules(Muon, params, {}, {"rule": "soap_muon"}, {"rule": Shampoo(1e-2)}), params)
    a.steps(range(3))
    b = copied(a, how)
    run_both(a, b, range(3, 6))
    assert all_same(a.params, b.params)
    b.optimizer.add_param_group({"params": [parameter(4, 4)], "rule": "klsoap"})


def test_groups_hold_plain_values() -> None:
    """A saved state has rules and dtypes by name, so that a state dict is read without the
    classes."""
    params = parameters([(4, 4), (4, 4)])
    rule = Shampoo(1e-2, state_dtype=torch.bfloat16)
    groups = with_rules(Muon, params, {}, {"rule": rule}).state_dict()["param_groups"]
    plain = {str, int, float, bool, tuple, list, dict, type(None)}
    assert {type(value) for group in groups for value in group.values()} <= plain
    assert groups[1]["state_dtype"] == "bfloat16"


def test_what_a_group_of_another_rule_takes_over_from_the_optimizer() -> None:
    """It takes over learning rate, weight decay and its method, and options of the engine; but no
    option that only looks alike, such as a layout or betas."""
    rules: list[dict[str, Any]] = [
        *({"rule": name} for name in ("muon", "adamw", "klsoap", "soap")),
        {"rule": "adamw", "lr": 0.5, "weight_decay": 0.0},
        {"rule": Muon.rule()},
    ]
    given: dict[str, Any] = {
        **{"lr": 0.25, "weight_decay": 0.125, "weight_decay_method": "palm", "nonfinite": "skip"},
        **{"max_state_bytes": 10**6, "state_dtype": torch.float64},
    }
    own_of_soap: Any = {"betas": (0.5, 0.6), "eps": 1e-3, "matrix_layout": "per_expert"}
    params = parameters([(4, 4)] * 4 + [(3,), (4, 4)])
    optimizer = with_rules(SOAP, params, *rules, **given, **own_of_soap)
    muon, adamw, kl, soap, own, instance = optimizer.param_groups
    for group in (muon, adamw, kl, soap):
        assert {key: group[key] for key in given} == given
    assert (muon["momentum"], muon["matrix_layout"], kl["matrix_layout"]) == (0.95, *["tensor"] * 2)
    assert (kl["betas"], soap["betas"]) == ((0.9, 0.95), (0.5, 0.6))
    assert (soap["matrix_layout"], "momentum" in soap) == ("per_expert", False)
    # SOAP has AdamW for its vectors, so that these are AdamW's options, too
    assert (adamw["betas"], adamw["eps"]) == ((0.5, 0.6), 1e-3)
    names = ("lr", "weight_decay", "nonfinite")
    assert [own[name] for name in names] == [0.5, 0.0, "skip"]
    assert [instance[name] for name in names] == [1e-2, 0.01, "raise"]


@pytest.mark.parametrize("cls", [SOAP, KLSOAP])
def test_clipping_does_not_change_what_the_rest_inherits(cls: Any) -> None:
    for options in ({}, {"max_update_rms": 0.1}):
        optimizer = with_rules(
            cls, [parameter(3)], {"rule": "adamw"}, lr=1e-2, betas=(0.8, 0.85), **options
        )
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.85)


def test_a_scheduler_that_turns_betas_leaves_groups_without_them_alone() -> None:
    """torch's OneCycleLR asks only the first group whether it has momentum or betas."""
    params = parameters([(4, 4), (4, 4)])
    optimizer = with_rules(SOAP, params, {}, {"rule": "muon"}, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    seen = set()
    for step in range(9):
        run(optimizer, params, [step])
        first, second = optimizer.param_groups
        seen.add((first["betas"][0], second["momentum"], second["lr"]))
        scheduler.step()
    assert len(seen) == 9
    assert {momentum for _, momentum, _ in seen} == {0.95}


# --- frozen and thawed ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["soap", "kl_soap", "soap_muon", "muon", "adamw", "shampoo"])
def test_frozen_parameters_are_stepped_once_they_have_gradients(kind: str) -> None:
    a = run_of(kind, [(6, 4), (6, 4), (5,)])
    alone = run_of(kind, [(6, 4), (6, 4), (5,)])
    for p in a.params[1:]:
        p.requires_grad_(False)
    run(a.optimizer, a.params[:1], range(3))
    # the state of parameters without any
    a.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    run(a.optimizer, a.params[:1], range(3, 5))
    assert all_same(a.params[1:], alone.params[1:])
    assert not any(a.optimizer.state.get(p) for p in a.params[1:])
    for p in a.params[1:]:
        p.requires_grad_(True)
    for step in range(5, 10):
        give_gradients(a.params, step)
        copy_gradients(a.params[1:], alone.params[1:])
        a.optimizer.step()
        alone.optimizer.step()
    assert [int(a.state(i)["step"]) for i in range(3)] == [10, 5, 5]
    for p, q in zip(a.params[1:], alone.params[1:], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["soap", "muon", "shampoo"])
def test_parameters_frozen_again_keep_their_state(kind: str) -> None:
    a, b = run_of(kind, [(6, 4), (6, 4)]), run_of(kind, [(6, 4), (6, 4)])
    a.steps(range(2))
    a.params[1].requires_grad_(False)
    a.params[1].grad, before = None, {name: x.clone() for name, x in a.state(1).items()}
    run(a.optimizer, a.params[:1], range(2, 4))
    for p, q in zip(a.params, b.params, strict=True):
        q.data.copy_(p.data)
    b.params[1].requires_grad_(False)  # in this optimizer it has been frozen from the beginning
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    assert same_state(*a, *b)
    assert all(torch.equal(x, a.state(1)[name]) for name, x in before.items())
    for one in (a, b):
        one.params[1].requires_grad_(True)
    run_both(a, b, range(4, 7))
    assert all_same(a.params, b.params)
    assert int(b.state(1)["step"]) == 5


def test_groups_of_a_model_hold_what_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    optimizer, start = Muon(parameter_groups(model), lr=0.1), clones(model.parameters())
    for thawed in (False, True):
        model[0].requires_grad_(thawed)
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        moved = [not torch.equal(p, w) for p, w in zip(model.parameters(), start, strict=True)]
        assert moved == [thawed, thawed, True, True]
