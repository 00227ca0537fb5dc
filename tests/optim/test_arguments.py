"""Arguments that an optimizer does not have: a TypeError that names each, what is meant, and all
that there are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim.optimizer import ParamsT

from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon, Rule, constructor
from lather.optim.batched.known_keys import EQUIVALENTS, OTHER_NAMES
from lather.optim.optimizers import OPTIMIZER_OF
from lather.optim.options import options_of
from lather.optim.rules import RULES
from lion_rule import Lion

OPTIMIZERS = tuple(OPTIMIZER_OF.values())

UNKNOWN: dict[str, tuple[type[MatrixOptimizer], dict[str, Any], str]] = {
    "momentum": (SOAP, {"momentum": 0.9}, r"'momentum' \(.*give betas=\(momentum, beta2\)\)"),
    "beta1": (AdamW, {"beta1": 0.9}, r"'beta1' \(give betas=\(beta1, beta2\)\)"),
    "beta1 of muon": (Muon, {"beta1": 0.9}, r"'beta1' \(did you mean 'momentum'\?\)"),
    "betas of muon": (Muon, {"betas": (0.9, 0.9)}, r"'betas' \(give betas\[0\] as momentum\)"),
    "wd": (Muon, {"wd": 0.1}, "did you mean 'weight_decay'"),
    "epsilon": (SOAP, {"epsilon": 1e-8}, "did you mean 'eps'"),
    "eps of muon": (Muon, {"eps": 1e-8}, "it is an argument of .*SOAP"),
    "learning rate": (Muon, {"learning_rate": 0.1}, "did you mean 'lr'"),
    "ns_steps": (Muon, {"ns_steps": 5}, "did you mean 'steps'"),
    "nesterov": (SOAP, {"nesterov": True}, "did you mean 'use_nesterov'"),
    "use_nesterov": (Muon, {"use_nesterov": True}, "did you mean 'nesterov'"),
    "amsgrad": (AdamW, {"amsgrad": False}, "no rule of Lather has that; leave it out"),
    "fused": (AdamW, {"fused": True}, "it changes no number: leave it out"),
    "sides": (Muon, {"sides": "smaller"}, "it is an argument of .*SOAP"),
    "slip": (SOAP, {"precondition_freqency": 3}, "did you mean 'precondition_frequency'"),
    "frequency": (SOAP, {"precond_freq": 3}, "did you mean 'precondition_frequency'"),
    "two": (Muon, {"wd": 0.1, "xyzzy": 1}, "s 'wd' .*, 'xyzzy'. Its arguments are params, lr"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_argument_that_there_is_not(case: str) -> None:
    cls, arguments, message = UNKNOWN[case]
    with pytest.raises(TypeError, match=f"^{cls.__name__} has no argument.*{message}") as raised:
        cls([torch.nn.Parameter(torch.ones(3, 3))], **arguments)
    for name in inspect.signature(cls).parameters:
        assert name == "tp_group" or f" {name}" in str(raised.value)


def test_arguments_without_parameters_are_looked_at_first() -> None:
    with pytest.raises(TypeError, match=r"^SOAP has no argument 'momentum' \(.*betas=\(momentum"):
        SOAP(momentum=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Muon has no argument 'betas' \(give betas\[0\] as"):
        Muon(betas=(0.9, 0.95))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^SOAP: missing a required argument: 'params'"):
        SOAP()  # type: ignore[call-arg]


def test_an_argument_that_is_given_twice() -> None:
    with pytest.raises(TypeError, match=r"^Muon: multiple values for argument 'lr'"):
        Muon([torch.nn.Parameter(torch.ones(3, 3))], 0.1, lr=0.1)  # type: ignore[misc]


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_every_optimizer_hints_only_at_arguments_that_it_has(cls: type[MatrixOptimizer]) -> None:
    own = inspect.signature(cls).parameters
    for name in {*EQUIVALENTS, *OTHER_NAMES, "learning_rat", "weightdecay"} - own.keys():
        with pytest.raises(TypeError) as raised:
            cls([torch.nn.Parameter(torch.ones(3, 3))], **{name: 1})
        hint = str(raised.value).partition(". Its arguments are")[0]
        for meant in hint.split("did you mean '")[1:]:
            assert meant.partition("'")[0] in own


def test_equivalents_are_options() -> None:
    known = {name for rule in RULES.values() for name in options_of(rule)}
    assert {option for pairs in EQUIVALENTS.values() for option, _ in pairs} <= known


def test_a_model_in_place_of_its_parameters_is_refused_with_the_remedy() -> None:
    for cls in (SOAP, Muon):
        with pytest.raises(
            TypeError,
            match=(
                r"^params is a model, Linear: give "
                r"parameter_groups\(model\), or model\.parameters\(\)"
            ),
        ):
            cls(torch.nn.Linear(4, 4), lr=1e-2)  # type: ignore[arg-type]


class Signs(MatrixOptimizer):
    """An optimizer of somebody's own."""

    rule = Lion

    @constructor(Lion)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


def test_an_optimizer_of_ones_own_hints_at_its_options() -> None:
    with pytest.raises(TypeError, match=r"^Signs has no argument 'momentum' \(.*betas"):
        Signs([torch.nn.Parameter(torch.ones(3, 3))], momentum=0.9)  # type: ignore[call-arg]


def test_a_group_names_the_equivalent_option() -> None:
    params = [torch.nn.Parameter(torch.ones(3, 3))]
    with pytest.raises(
        ValueError, match=r"'soap': leave it out.*; .*give betas=\(momentum, beta2\)"
    ):
        SOAP([{"params": params, "momentum": 0.9}])
