"""Keys that other programs leave in parameter groups: what asks for another rule or another step
is refused, in every way in."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import all_same, parameter, parameters, run, run_both
from strangers import Lion
from test_state import through_a_file

from lather.optim import (
    SOAP,
    AdamW,
    EmbeddingSOAP,
    MatrixOptimizer,
    Muon,
    SOAPMuon,
)

QUINTIC = (3.4445, -4.7750, 2.0315)

Made = Callable[..., MatrixOptimizer]


def lion(params: Any, **options: Any) -> MatrixOptimizer:
    return MatrixOptimizer(params, Lion(1e-2, **options))


REFUSED: dict[str, tuple[Made, dict[str, Any], str]] = {
    # Keys by which others choose a rule: Jordan's Muon, DeepSpeed, dion, nanochat.
    "use_muon": (
        Muon,
        {"use_muon": False, "lr": 3e-4},
        r"use_muon=False .* asks for adamw, .* rule is 'muon': give the group \"rule\": \"adamw\"",
    ),
    "use_muon_of_soap": (
        SOAP,
        {"use_muon": False},
        r"asks for adamw, but the group's rule is 'soap'",
    ),
    "use_muon_under_adamw": (
        AdamW,
        {"use_muon": True},
        r"use_muon=True .* asks for muon, .* 'adamw': give the group \"rule\": \"muon\"",
    ),
    "use_muon_against_a_rule": (
        Muon,
        {"use_muon": True, "rule": "adamw"},
        r"asks for muon, but the group's rule is 'adamw'",
    ),
    "is_muon": (Muon, {"is_muon": 0}, "is_muon=0 .* asks for adamw"),
    "use_adam": (Muon, {"use_adam": True}, 'use_adam=True .* asks for adam, .* "rule": "adamw"'),
    "use_adamw": (
        AdamW,
        {"use_adamw": False},
        'use_adamw=False .* asks for not adamw, .* give the group another "rule"',
    ),
    "use_soap": (Muon, {"use_soap": True}, 'asks for soap, .* "rule": "soap"'),
    "use_shampoo": (
        SOAP,
        {"use_shampoo": True},
        "asks for shampoo, .* Lather has no such rule; give these parameters to another",
    ),
    "use_lion": (Muon, {"use_lion": True}, "asks for lion, .* Lather has no such rule"),
    "no_lion": (
        lion,
        {"use_lion": False},
        "asks for not lion, but the group's rule is 'strangers:Lion'",
    ),
    "algorithm": (
        Muon,
        {"algorithm": "adamw", "lr": 3e-4},
        'algorithm=\'adamw\' .* asks for adamw, .* "rule": "adamw"',
    ),
    "algorithm_lion": (Muon, {"algorithm": "lion"}, "Lather has no such rule"),
    "normuon": (Muon, {"algorithm": "normuon"}, '"rule": "muon", "normalize": "row"'),
    "algo": (SOAP, {"algo": "soap_muon"}, 'asks for soapmuon, .* "rule": "soap_muon"'),
    "optimizer": (Muon, {"optimizer": "AdamW"}, "optimizer='AdamW' .* asks for adamw"),
    "optimizer_class": (Muon, {"optimizer": torch.optim.AdamW}, "asks for adamw"),
    "optim": (Muon, {"optim": "adamw"}, "asks for adamw"),
    "class": (Muon, {"optimizer_class": torch.optim.AdamW}, "asks for adamw"),
    "capital": (Muon, {"Algorithm": "AdamW"}, "Algorithm='AdamW' .* asks for adamw"),
    "capitals": (Muon, {"USE_MUON": False}, "USE_MUON=False .* asks for adamw"),
    "camel": (Muon, {"useMuon": False}, "useMuon=False .* asks for adamw"),
    "camel_adamw": (Muon, {"useAdamW": True}, 'useAdamW=True .* "rule": "adamw"'),
    "bare": (Muon, {"adamw": True}, 'adamw=True .* asks for adamw, .* "rule": "adamw"'),
    "bare_false": (Muon, {"muon": False}, "muon=False .* asks for adamw"),
    "fallback": (Muon, {"use_fallback": True}, 'asks for adamw, .* give the group "rule": "adamw"'),
    "fallback_of_soap": (SOAP, {"use_fallback": True}, "asks for adamw"),
    "tensor": (Muon, {"use_muon": torch.tensor(False)}, "use_muon=False .* asks for adamw"),
    "tensor_of_one": (AdamW, {"amsgrad": torch.tensor([True])}, "amsgrad=True .* another step"),
    # Arrays in the place of one value.
    "use_array": (
        Muon,
        {"use_muon": np.array([True, False])},
        "use_muon=array.* is not valid: give True or False",
    ),
    "array": (
        AdamW,
        {"amsgrad": np.array([True, False])},
        r"amsgrad=array\(.* is not valid: give one value \(True or False, a number, a word\)",
    ),
    "tensor_of_two": (Muon, {"adam_w_mode": torch.ones(2)}, "adam_w_mode=tensor.* is not valid"),
    "array_of_scales": (Muon, {"adjust_lr_fn": np.array([1, 2])}, "adjust_lr_fn=array.* not valid"),
    "array_of_steps": (Muon, {"ns_steps": np.array([5, 5])}, "ns_steps=array.* is not valid"),
    "array_of_betas": (Muon, {"betas": np.ones(2)}, "betas=.* is an option of adamw"),
    "kind": (Muon, {"kind": "adamw"}, "kind='adamw' .* asks for adamw"),
    # Properties of the step.
    "amsgrad": (
        AdamW,
        {"amsgrad": True},
        "amsgrad=True .* asks for another step .* no rule of Lather has that; leave the key out",
    ),
    "differentiable": (Muon, {"differentiable": True}, "differentiable=True"),
    "cautious": (AdamW, {"cautious": True}, "cautious=True"),
    "dampening": (Muon, {"dampening": 0.9}, "dampening=0.9"),
    "coupled": (
        AdamW,
        {"decoupled_weight_decay": False},
        'decoupled_weight_decay=False .* "weight_decay_method" in its place: "decoupled", "l2"',
    ),
    "decoupled": (
        AdamW,
        {"decoupled_weight_decay": True, "weight_decay_method": "l2"},
        "decoupled_weight_decay=True",
    ),
    "adam_w_mode": (AdamW, {"adam_w_mode": False}, "adam_w_mode=False .*weight_decay_method"),
    "fixed_decay": (AdamW, {"fixed_decay": True}, 'fixed_decay=True .* "independent"'),
    "adjust_lr_fn": (
        Muon,
        {"adjust_lr_fn": "original"},
        'adjust_lr_fn=\'original\' .* "scale": "spectral"',
    ),
    "adjust_lr_fn_of_none": (Muon, {"adjust_lr_fn": None}, "adjust_lr_fn=None"),
    "adjust_lr_fn_of_soap": (SOAP, {"adjust_lr_fn": "match_rms_adamw"}, "adjust_lr_fn"),
    "adjust_lr": (Muon, {"adjust_lr": "spectral_norm"}, "adjust_lr='spectral_norm'"),
    "use_adjusted_lr": (Muon, {"use_adjusted_lr": False}, '"scale": "spectral"'),
    "ns_coefficients": (
        Muon,
        {"ns_coefficients": (2.0, -1.5, 0.5)},
        'ns_coefficients=.* "coefficients": "quintic"',
    ),
    "ns_coefficients_of_polar": (
        Muon,
        {"ns_coefficients": QUINTIC, "coefficients": "polar_express"},
        "ns_coefficients",
    ),
    "ns_steps": (Muon, {"ns_steps": 1}, "ns_steps=1 .* did you mean 'steps'"),
    "ns_steps_of_soap": (SOAP, {"ns_steps": 5}, "ns_steps=5 .* an option of muon and soap_muon"),
    "normalize_grads": (
        SOAP,
        {"normalize_grads": True},
        "normalize_grads=True .* did you mean 'normalize_preconditioned_grads', an option of soap",
    ),
    "merge_dims": (SOAP, {"merge_dims": True}, "merge_dims=True .* another step"),
    "bias_correction": (AdamW, {"bias_correction": False}, "did you mean 'correct_bias'"),
    # Options under other names, and for other parameters.
    "mu": (Muon, {"mu": 0.95}, "did you mean 'momentum'"),
    "beta1": (AdamW, {"beta1": 0.9}, "did you mean 'betas'"),
    "mu_of_adamw": (
        AdamW,
        {"mu": 0.9},
        "mu=0.9 .* is an option 'momentum' of muon, soap_muon, not of the group's rule 'adamw'",
    ),
    "adamw_betas": (
        Muon,
        {"adamw_betas": (0.9, 0.95)},
        'adamw_betas=.* step of adamw, .* "rule": "adamw", and options without "adamw_"',
    ),
    "adam_lr": (SOAPMuon, {"adam_lr": 3e-4}, "adam_lr=0.0003"),
    "muon_lr": (Muon, {"muon_lr": 0.02}, "unknown option 'muon_lr' .* did you mean 'lr'"),
    "muon_wd": (SOAPMuon, {"muon_wd": 0.02}, "'muon_wd' .* did you mean 'weight_decay'"),
    "own_adamw_lr": (AdamW, {"adamw_lr": 0.02}, "'adamw_lr' .* did you mean 'lr'"),
    "own_adam_beta": (AdamW, {"adam_beta1": 0.9}, "'adam_beta1' .* did you mean 'betas'"),
    "no_option": (
        Muon,
        {"muon_betas": (0.9, 0.9)},
        "'betas' is no option of the group's rule 'muon': leave it out",
    ),
    "soap_muon_lr": (Muon, {"soap_muon_lr": 0.1}, 'step of soap_muon, .* "rule": "soap_muon"'),
    "LR": (Muon, {"LR": 0.1}, "unknown option 'LR' .* did you mean 'lr'"),
    "weightDecay": (Muon, {"weightDecay": 0.1}, "did you mean 'weight_decay'"),
    # Options of other rules.
    "betas": (
        Muon,
        {"betas": (0.9, 0.95)},
        "betas=.* is an option of adamw, .*soap.*, not of the group's rule 'muon': leave it out",
    ),
    "eps": (Muon, {"eps": 1e-8}, "eps=1e-08 .* is an option of adamw"),
    "momentum": (AdamW, {"momentum": 0.9}, "momentum=0.9 .* is an option of muon, soap_muon"),
    "frequency": (
        Muon,
        {"precondition_frequency": 10},
        "precondition_frequency=10 .* is an option of .*soap",
    ),
    "nesterov_of_soap": (SOAP, {"nesterov": True}, "nesterov=True .* did you mean 'use_nesterov'"),
    "of_a_strangers_rule": (
        lion,
        {"rule": "adamw", "momentum": 0.5},
        "momentum=0.5 .* is an option of muon",
    ),
}


@pytest.mark.parametrize("way", ["constructor", "add_param_group", "later", "load_state_dict"])
@pytest.mark.parametrize(("cls", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_asks_for_another_rule_or_step_is_refused(
    cls: Made,
    keys: dict[str, Any],
    message: str,
    way: str,
) -> None:
    """Nothing has changed then, and without the key the run goes on."""
    params, others = parameters([(4, 4), (4, 4)]), parameters([(4, 4), (4, 4)])
    if way == "constructor":
        with pytest.raises(ValueError, match=message):
            cls([{"params": params, **keys}])
        return
    options = {
        key: value
        for key, value in keys.items()
        if key
        in (
            "rule",
            "coefficients",
            "weight_decay_method",
            "lr",
        )
    }
    asking = {key: value for key, value in keys.items() if key not in options}
    optimizer, twin = (cls([{"params": some[:1], **options}]) for some in (params, others))
    run_both((optimizer, params[:1]), (twin, others[:1]), range(2))
    if way == "add_param_group":
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": params[1:], **keys})
        assert len(optimizer.param_groups) == 1
    elif way == "later":
        optimizer.param_groups[0].update(asking)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        for key in asking:
            del optimizer.param_groups[0][key]
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].update(asking)
        saved["param_groups"][0]["lr"] = 0.5
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
    run_both((optimizer, params[:1]), (twin, others[:1]), range(2, 4))
    assert all_same(params, others)


KEPT: dict[str, tuple[Made, dict[str, Any]]] = {
    "jordan": (Muon, {"use_muon": True}),
    "jordan_under_soap_muon": (SOAPMuon, {"use_muon": True, "is_adamw": False, "use_lion": False}),
    "jordans_adam": (
        Muon,
        {"use_muon": False, "rule": "adamw", "betas": (0.9, 0.95), "eps": 1e-10},
    ),
    "dion": (
        Muon,
        {
            "algorithm": "muon",
            "adjust_lr": "rms_norm",
            "use_polar_express": False,
            "flatten_scale": 1.0,
        },
    ),
    "dions_adamw": (Muon, {"algorithm": "adamw", "rule": "adamw"}),
    "normuon": (Muon, {"algorithm": "normuon", "normalize": "row"}),
    "nanochat": (Muon, {"kind": "muon", "ns_steps": 5}),
    "lion": (lion, {"algorithm": "Lion", "use_lion": True, "use_adam": False}),
    "soap": (SOAP, {"optimizer": "SOAP", "use_soap": True}),
    "embeddings": (EmbeddingSOAP, {"algo": "soap"}),
    "torchs_muon": (
        Muon,
        {
            "ns_steps": 5,
            "ns_coefficients": list(QUINTIC),
            "adjust_lr_fn": None,
            "eps": 1e-7,
            "scale": "spectral",
        },
    ),
    "torchs_muon_as_adamw": (Muon, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "steps": 3}),
    "torchs_adam": (
        AdamW,
        {
            "decoupled_weight_decay": False,
            "weight_decay": 0.0,
            "amsgrad": False,
            "differentiable": False,
        },
    ),
    "coupled": (
        AdamW,
        {"decoupled_weight_decay": False, "weight_decay_method": "l2", "weight_decay": 0.5},
    ),
    "deepspeed": (
        AdamW,
        {"bias_correction": True, "adam_w_mode": True, "moe": True, "name": "experts", "step": 7},
    ),
    "megatron": (
        AdamW,
        {
            "wd_mult": 1.0,
            "lr_mult": 0.5,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
        },
    ),
    "olmo": (AdamW, {"initial_lr": 0.1, "lr_max": 1.0, "min_lr": 0.0}),
    "labels": (
        SOAP,
        {
            "group_name": "decay",
            "layer_id": 3,
            "kind": "matrices",
            "type": "no_decay",
            "is_bias": False,
            "label": None,
        },
    ),
    "no_rules": (
        SOAP,
        {
            "kind": "adam-free",
            "type": "soap film",
            "group_type": "adamw_group",
            "no_weight_decay": True,
            "lr_factor": 1.0,
            "groupName": "matrices",
        },
    ),
    "timm": (Muon, {"use_fallback": False}),
    "timms_adamw": (Muon, {"use_fallback": True, "rule": "adamw"}),
    "nadam": (SOAP, {"merge_dims": False, "normalize_grads": False, "use_nadam": False}),
    "bare": (Muon, {"muon": True, "adamw": False}),
    "tensor": (Muon, {"use_muon": torch.tensor(True), "ns_coefficients": torch.tensor(QUINTIC)}),
    "tensors": (
        Muon,
        {
            "ns_coefficients": list(map(torch.tensor, QUINTIC)),
            "ns_coeffs": torch.tensor([QUINTIC], dtype=torch.float64),
        },
    ),
    "groups_of_ours": (Muon, {"sides": "auto", "matrix_layout": "tensor"}),
    "sgds": (Muon, {"dampening": 0}),
}


def unpacked(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("cls", "keys"), KEPT.values(), ids=KEPT)
def test_what_asks_for_what_happens_anyway_is_kept(
    cls: Made,
    keys: dict[str, Any],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """The group takes the step that it takes without the keys, also after it was saved and
    loaded."""
    names = ("rule", "betas", "normalize", "scale", "steps", "weight_decay", "weight_decay_method")
    options = {key: keys[key] for key in names if key in keys}
    if options.get("rule") == "adamw" and "eps" in keys:
        options["eps"] = keys["eps"]
    params, others = parameters([(4, 4), (5, 3)]), parameters([(4, 4), (5, 3)])
    optimizer, plain = cls([{"params": params, **keys}]), cls([{"params": others, **options}])
    run_both((optimizer, params), (plain, others), range(2))
    saved = through_a_file(optimizer.state_dict())
    optimizer = cls([{"params": params, **keys}])
    optimizer.load_state_dict(saved)
    run_both((optimizer, params), (plain, others), range(2, 4))
    assert all_same(params, others)
    kept = optimizer.param_groups[0]
    assert all(unpacked(kept[key]) == unpacked(value) for key, value in keys.items())
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]


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
    for key in ("lr_factor", "lrFactor"):
        with pytest.raises(ValueError, match=f"{key}=3.2 .* multiply lr yourself"):
            Muon([{"params": [parameter(4, 4)], key: 3.2}], lr=1e-2)
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


GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"params": [parameter(4, 4)]}, r" \(parameter group 1\)$"),
    "name": ({"params": [parameter(4, 4)], "name": "heads"}, r" \(parameter group 1 'heads'\)$"),
    "first": (
        {"params": [("x.weight", parameter(4, 4)), ("y.weight", parameter(4, 4))]},
        r" \(parameter group 1, which begins with 'x.weight'\)$",
    ),
}
BAD_KEYS: dict[str, Any] = {
    "use_muon": False,
    "lr": -1.0,
    "momentum": np.array([0.5, 0.6]),
    "betas": (0.9, 0.9),
    "rule": 3,
    "partition_dim": 0,
}


@pytest.mark.parametrize("key", BAD_KEYS)
@pytest.mark.parametrize(("group", "end"), GROUPS.values(), ids=GROUPS)
def test_errors_say_which_group_they_are_about(group: Any, end: str, key: str) -> None:
    first = [("a", parameter(4, 4))] if "begins" in end else [parameter(4, 4)]
    with pytest.raises((TypeError, ValueError), match=f"{key}.*{end}"):
        Muon([{"params": first}, {**group, key: BAD_KEYS[key]}])
    optimizer = Muon(first)
    with pytest.raises((TypeError, ValueError), match=f"{key}.*{end}"):
        optimizer.add_param_group({**group, key: BAD_KEYS[key]})
    assert len(optimizer.param_groups) == 1


def test_errors_of_a_step_say_which_group_they_are_about() -> None:
    params = parameters([(4, 4), (4, 4)])
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "name": "heads"}])
    for key in ("use_muon", "momentum"):
        optimizer.param_groups[1][key] = -1 if key == "momentum" else False
        with pytest.raises(ValueError, match=rf"{key}.* \(parameter group 1 'heads'\)$"):
            optimizer.step()
        optimizer.param_groups[1][key] = 0.5 if key == "momentum" else True


def test_a_key_that_is_no_text_is_named() -> None:
    with pytest.warns(UserWarning, match="kept and ignored: 7$"):
        Muon([{"params": [parameter(4, 4)], 7: 1}])
