"""Keys that other programs leave in parameter groups: those that change nothing are kept. (What
asks for another rule or another step is refused in every way in: `in_group` in `mistakes.txt`.)"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import all_same, clones, parameter, parameters, run, run_both, through_a_file
from strangers import Lion, Shampoo

from lather.optim import (
    KLSOAP,
    SOAP,
    AdamW,
    EmbeddingSOAP,
    MatrixOptimizer,
    Muon,
    SOAPMuon,
    parameter_groups,
)

QUINTIC = (3.4445, -4.7750, 2.0315)

Made = Callable[..., MatrixOptimizer]


def lion(params: Any, **options: Any) -> MatrixOptimizer:
    return MatrixOptimizer(params, Lion(1e-2, **options))


def shampoo(params: Any, **options: Any) -> MatrixOptimizer:
    return MatrixOptimizer(params, Shampoo(1e-2, **options))


OF_OTHERS = {
    **{"foreach": None, "fused": False, "capturable": True, "amsgrad": False},
    **{"lr_scale": 0.3, "lr_mult": 2.0, "weight_decay_mult": 0.0, "weight_decay_scale": 1.0},
    **{"group_name": "decay", "is_expert": True, "layer_id": 3, "initial_lr": 0.1, "swa_lr": 0.05},
    **{"differentiable": False, "decoupled_weight_decay": True, "kind": "decay"},
    "optimizer": "auto",
}
"""Keys that torchtitan, timm and others leave in groups."""


def case(cls: Made, **keys: Any) -> Any:
    """Return an optimizer and the keys of a group, which tests show by their names."""
    return pytest.param(cls, keys, id=f"{cls.__name__}: {', '.join(keys)}")


KEPT = [
    *(case(cls, **OF_OTHERS) for cls in (SOAP, EmbeddingSOAP, Muon, SOAPMuon, AdamW, shampoo)),
    case(Muon, use_muon=True),
    case(SOAPMuon, use_muon=True, is_adamw=False, use_lion=False),
    case(Muon, use_muon=False, rule="adamw", betas=(0.9, 0.95), eps=1e-10),
    case(Muon, algorithm="muon", adjust_lr="rms_norm", use_polar_express=False, flatten_scale=1.0),
    case(Muon, algorithm="adamw", rule="adamw"),
    case(Muon, algorithm="normuon", normalize="row"),
    case(Muon, kind="muon", ns_steps=5),
    case(lion, algorithm="Lion", use_lion=True, use_adam=False),
    case(SOAP, optimizer="SOAP", use_soap=True),
    case(EmbeddingSOAP, algo="soap"),
    case(
        Muon,
        ns_steps=5,
        ns_coefficients=list(QUINTIC),
        adjust_lr_fn=None,
        eps=1e-07,
        scale="spectral",
    ),
    case(Muon, adjust_lr_fn="match_rms_adamw", ns_steps=3, steps=3),
    case(
        AdamW, decoupled_weight_decay=False, weight_decay=0.0, amsgrad=False, differentiable=False
    ),
    case(AdamW, decoupled_weight_decay=False, weight_decay_method="l2", weight_decay=0.5),
    case(AdamW, bias_correction=True, adam_w_mode=True, moe=True, name="experts", step=7),
    case(
        AdamW,
        wd_mult=1.0,
        lr_mult=0.5,
        is_expert_parallel=False,
        is_decoupled_lr=False,
        default_config=True,
    ),
    case(AdamW, initial_lr=0.1, lr_max=1.0, min_lr=0.0),
    case(
        SOAP,
        group_name="decay",
        layer_id=3,
        kind="matrices",
        type="no_decay",
        is_bias=False,
        label=None,
    ),
    case(
        SOAP,
        kind="adam-free",
        type="soap film",
        group_type="adamw_group",
        no_weight_decay=True,
        lr_factor=1.0,
        groupName="matrices",
    ),
    case(Muon, use_fallback=False),
    case(Muon, use_fallback=True, rule="adamw"),
    case(SOAP, merge_dims=False, normalize_grads=False, use_nadam=False),
    case(AdamW, optim="paged_adamw", optimizer="torch_adamw", algo="muon_adamw"),
    case(Muon, optim="dist_muon", optimizer="muon_adamw", useMuon=True),
    case(Muon, muon=True, adamw=False),
    case(Muon, use_muon=torch.tensor(True), ns_coefficients=torch.tensor(QUINTIC)),
    case(
        Muon,
        ns_coefficients=list(map(torch.tensor, QUINTIC)),
        ns_coeffs=torch.tensor([QUINTIC], dtype=torch.float64),
    ),
    case(Muon, sides="auto", matrix_layout="tensor"),
    case(Muon, dampening=0),
]


OPTIONS = (
    "lr",
    "rule",
    "betas",
    "normalize",
    "scale",
    "steps",
    "weight_decay",
    "weight_decay_method",
)


@pytest.mark.parametrize(("cls", "keys"), KEPT)
def test_what_asks_for_what_happens_anyway_is_kept(cls: Made, keys: dict[str, Any]) -> None:
    """The group takes the step that it takes without the keys, also if they come later or change,
    and after it was saved and loaded."""
    options = {key: keys[key] for key in OPTIONS if key in keys}
    if options.get("rule") == "adamw" and "eps" in keys:
        options["eps"] = keys["eps"]
    params, others = parameters([(4, 4), (5, 3)]), parameters([(4, 4), (5, 3)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer, plain = cls([{"params": params, **keys}]), cls([{"params": others, **options}])
        run_both((optimizer, params), (plain, others), range(2))
        saved = through_a_file(optimizer.state_dict())
        optimizer = cls([{"params": params, **options}])
        optimizer.load_state_dict(saved)
        run_both((optimizer, params), (plain, others), range(2, 4))
        kept = optimizer.param_groups[0]
        assert all(unpacked(kept[key]) == unpacked(value) for key, value in keys.items())
        kept |= {"swa_lr": 0.7, "lr_scale": 7.0, "foreach": True}
        run_both((optimizer, params), (plain, others), range(4, 6))
    assert all_same(params, others)
    assert kept["lr_scale"] == 7.0


def unpacked(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


# --- keys of which nothing is known ---------------------------------------------------------------


def test_unknown_keys_are_named_once_in_one_warning() -> None:
    params = parameters([(4, 4)] * 4)
    groups = [
        {"params": params[:1], "zorp": 1},
        {"params": params[1:2], "blub": True, "zorp": 2, "lr_scale": 1.0},
    ]
    with pytest.warns(UserWarning, match="kept and ignored: blub, zorp$") as caught:
        optimizer = Muon(groups)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": params[2:3], "zorp": 3})
        run(optimizer, params, range(2))
        resumed = copy.deepcopy(optimizer)
        run(resumed, [p for group in resumed.param_groups for p in group["params"]], range(2, 3))
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["gurk"] = 1
    with pytest.warns(UserWarning, match="kept and ignored: gurk$"):
        run(optimizer, params, range(2, 4))
    assert [group.get("zorp") for group in optimizer.param_groups] == [1, 2, 3]


def test_a_factor_of_the_rate_needs_a_rate_in_its_group() -> None:
    """A scheduler, such as that of Lather's trainer, may keep its factor beside the rate."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = Muon([{"params": [parameter(4, 4)], "lr": 3.2e-2, "lr_factor": 3.2}], lr=1e-2)
        optimizer.load_state_dict(optimizer.state_dict())
        run(optimizer, optimizer.param_groups[0]["params"], range(2))


@pytest.mark.parametrize("name", ["generator", "zorp", "critic", "not_muon", "non-adamw"])
@pytest.mark.parametrize("key", ["optimizer", "algorithm", "optim"])
def test_values_that_name_no_known_optimizer_are_unknown(key: str, name: str) -> None:
    """GANs call their groups by the optimizer that has them."""
    with pytest.warns(UserWarning, match=f"kept and ignored: {key}$"):
        Muon([{"params": [parameter(4, 4)], key: name}])


def test_a_value_that_is_changed_later_is_noticed() -> None:
    params = parameters([(4, 4)])
    keys = {"use_muon": True, "amsgrad": False, "kind": "matrices", "ns_steps": 5, "adamw": False}
    optimizer = Muon([{"params": params, **keys}])
    run(optimizer, params, range(2))
    asking = {"use_muon": False, "amsgrad": True, "kind": "adamw", "ns_steps": 4, "adamw": True}
    for key, value in asking.items():
        before = params[0].detach().clone()
        optimizer.param_groups[0][key] = value
        with pytest.raises(ValueError, match=f"^{key}={value!r} in a parameter group asks for"):
            run(optimizer, params, range(2, 3))
        assert torch.equal(params[0], before)
        optimizer.param_groups[0][key] = keys[key]
        run(optimizer, params, range(2, 3))


@pytest.mark.parametrize("write", ["constructor", "later"])
def test_arrays_of_kept_keys_do_not_hinder_changes_of_other_values(write: str) -> None:
    params = parameters([(4, 4)])
    keys = {"ns_coefficients": np.array(QUINTIC), "ns_coeffs": torch.tensor(QUINTIC)}
    optimizer = Muon([{"params": params, **(keys if write == "constructor" else {})}])
    run(optimizer, params, range(1))
    optimizer.param_groups[0].update(keys)
    for step in range(1, 4):
        run(optimizer, params, range(step, step + 1))
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
    assert optimizer.param_groups[0]["ns_coefficients"] == list(QUINTIC)


def test_a_key_that_is_no_text_is_named() -> None:
    with pytest.warns(UserWarning, match="kept and ignored: 7$"):
        Muon([{"params": [parameter(4, 4)], 7: 1}])


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
