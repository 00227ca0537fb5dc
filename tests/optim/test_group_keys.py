"""Keys that other programs leave in parameter groups, and groups that were made for other
optimizers. (Which keys are refused and which are kept is in `mistakes.txt`.)"""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import Run, all_same, clones, parameter, parameters, run

from lather.optim import KLSOAP, SOAP, AdamW, EmbeddingSOAP, Muon, SOAPMuon, parameter_groups

QUINTIC = (3.4445, -4.7750, 2.0315)


def test_unknown_keys_are_named_once_in_one_warning() -> None:
    params = parameters([(4, 4)] * 4)
    groups = [{"params": params[:1], "zorp": 1}, {"params": params[1:2], "blub": True, "zorp": 2}]
    with pytest.warns(UserWarning, match="kept and ignored: blub, zorp$"):
        a = Run(Muon(groups), params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a.optimizer.add_param_group({"params": params[2:3], "zorp": 3})
        a.steps(range(2))
        Run(copy.deepcopy(a.optimizer), params).steps(range(2, 3))
        a.optimizer.load_state_dict(a.optimizer.state_dict())
    a.groups[0]["gurk"] = 1
    with pytest.warns(UserWarning, match="kept and ignored: gurk$"):
        a.steps(range(2, 4))
    assert [group.get("zorp") for group in a.groups] == [1, 2, 3]


def test_a_value_that_is_changed_later_is_noticed() -> None:
    keys = {"use_muon": True, "amsgrad": False, "kind": "matrices", "ns_steps": 5, "adamw": False}
    params = parameters([(4, 4)])
    a = Run(Muon([{"params": params, **keys}]), params)
    a.steps(range(2))
    asking = {"use_muon": False, "amsgrad": True, "kind": "adamw", "ns_steps": 4, "adamw": True}
    for key, value in asking.items():
        before = clones(params)
        a.groups[0][key] = value
        with pytest.raises(ValueError, match=f"^{key}={value!r} in a parameter group asks for"):
            a.steps([2])
        assert all_same(params, before)
        a.groups[0][key] = keys[key]
        a.steps([2])


def test_a_scheduler_may_write_the_first_beta_as_momentum() -> None:
    """As MMEngine's do for Adam and its relatives; another value still asks for another rule."""
    params = parameters([(4, 4), (3,)])
    a, b = (Run(SOAP([{"params": x}]), x) for x in (params, clones(params)))
    for step in range(4):
        beta = 0.95 - 0.1 * step
        for one in (a, b):
            one.groups[0]["betas"] = (beta, 0.95)
        a.groups[0]["momentum"] = np.float64(beta)
        a.steps([step])
        b.steps([step])
    assert all_same(a.params, b.params)
    a.optimizer.load_state_dict(a.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"momentum=0.5 in a parameter group is an option of muon"):
        SOAP([{"params": parameters([(4, 4)]), "momentum": 0.5}])


@pytest.mark.parametrize("write", ["constructor", "later"])
def test_arrays_of_kept_keys_do_not_hinder_changes_of_other_values(write: str) -> None:
    params = parameters([(4, 4)])
    keys = {"ns_coefficients": np.array(QUINTIC), "ns_coeffs": torch.tensor(QUINTIC)}
    a = Run(Muon([{"params": params, **(keys if write == "constructor" else {})}]), params)
    a.steps([0])
    a.groups[0].update(keys)
    for step in range(1, 4):
        a.steps([step])
        a.groups[0]["weight_decay"] = 0.1 * step
    assert a.groups[0]["ns_coefficients"] == list(QUINTIC)


# --- groups of other optimizers -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.75)}])
def test_groups_of_an_optimizer_with_several_rules_are_taken_by_another_one(options: Any) -> None:
    """torch copies the optimizer's defaults into every group, and schedulers turn them there; they
    are inert where the group's rule has no such options."""
    params = parameters([(4, 4), (4, 4), (3,)])
    rules: list[dict[str, Any]] = [{}, {"rule": "muon"}, {"rule": "adamw"}]
    groups = [{"params": [p], **rule} for p, rule in zip(params, rules, strict=True)]
    first = SOAP(groups, lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=10)
    for step in range(3):
        run(first, params, [step])
        scheduler.step()
    others = clones(params)
    for cls in (SOAP, Muon, KLSOAP):
        pairs = zip(first.param_groups, others, strict=True)
        second = cls([{**group, "params": [p]} for group, p in pairs], lr=1e-2)
        assert [group["rule"] for group in second.param_groups] == ["soap", "muon", "adamw"]
        second.load_state_dict(first.state_dict())
        run(second, others, range(2))


def test_every_optimizer_takes_the_groups_of_parameter_groups() -> None:
    layers = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6), torch.nn.LayerNorm(6)
    groups = parameter_groups(torch.nn.Sequential(*layers), rest_lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in (SOAP, KLSOAP, EmbeddingSOAP, Muon, SOAPMuon, AdamW):
            cls(groups, lr=1e-2)


def test_groups_of_torchs_optimizers() -> None:
    """A whole group of Adam's is taken, and what it asks for in vain is named. Muon's is refused
    until `scale` says its factor."""
    p = parameter(4, 4)
    nadam = torch.optim.NAdam([p], decoupled_weight_decay=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for theirs in (torch.optim.AdamW([p]), torch.optim.Adam([p]), nadam):
            group = {**theirs.param_groups[0]}
            group.pop("momentum_decay", None)
            assert AdamW([group]).param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.warns(UserWarning, match="ignored: betas, eps$"):
        run(Muon(torch.optim.AdamW([p]).param_groups), [p], range(1))
    (group,) = torch.optim.Muon([p]).param_groups
    assert Muon([{**group, "scale": "spectral"}]).param_groups[0]["weight_decay"] == 0.1
    assert SOAP(torch.optim.AdamW([p]).param_groups).param_groups[0]["rule"] == "soap"
