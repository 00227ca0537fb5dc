"""State that other optimizers have saved: a run of torch.optim.Muon or AdamW goes on, and all else
is refused by name."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import (
    all_same,
    clones,
    copy_gradients,
    give_gradients,
    parameter,
    parameters,
    run,
    same_state,
    snapshot,
)
from test_state import through_a_file
from torch import Tensor

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon, SOAPMuon

SHAPES = [(16, 12), (12, 16), (16, 16)]

TOLERANCE = 0.04
"""Largest difference between an update of torch's Muon, which iterates in bf16, and the same
update, relative to its norm."""

MUON: dict[str, dict[str, Any]] = {
    "default": {},
    "as_adamw": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "original": {
        "adjust_lr_fn": "original",
        "momentum": 0.8,
        "weight_decay": 0.0,
        "lr": 0.05,
        "ns_steps": 3,
    },
}


def trained(
    cls: type[torch.optim.Optimizer], shapes: Any = SHAPES, **options: Any
) -> tuple[
    Any,
    list[torch.nn.Parameter],
]:
    params = parameters(shapes)
    optimizer: Any = cls(params, **options)
    run(optimizer, params, range(3))
    return optimizer, params


@pytest.mark.parametrize("options", MUON.values(), ids=MUON)
def test_a_run_of_torchs_muon_goes_on(
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Momentum goes on to rounding, and the updates agree to the error of torch's bf16; the next
    test shows that no other scale, rate, decay or number of steps would."""
    theirs, params = trained(torch.optim.Muon, **options)
    others = clones(params)
    ours = Muon(others, lr=1.0, momentum=0.1)
    with caplog.at_level(logging.WARNING, logger="lather"):
        ours.load_state_dict(through_a_file(theirs.state_dict()))
    assert "momentum_buffer and options of another Muon were taken for 3 parameters" in caplog.text
    assert {"ns_steps", "ns_coefficients", "adjust_lr_fn", "eps"}.isdisjoint(ours.param_groups[0])
    for p, q in zip(params, others, strict=True):
        assert torch.equal(theirs.state[p]["momentum_buffer"], ours.state[q]["momentum_buffer"])
        assert float(ours.state[q]["step"]) == 0.0
    assert go_on_together(theirs, params, ours, others) < TOLERANCE


def go_on_together(theirs: Any, params: list[Any], ours: Any, others: list[Any]) -> float:
    """Take four steps of both with the same gradients, and return the largest difference of a
    step, relative to the step. Momenta must agree to rounding."""
    worst = 0.0
    for step in range(3, 7):
        give_gradients(params, step)
        copy_gradients(params, others)
        before = [
            (p.detach().clone(), q.detach().clone())
            for p, q in zip(
                params,
                others,
                strict=True,
            )
        ]
        theirs.step()
        ours.step()
        for p, q, (old_p, old_q) in zip(params, others, before, strict=True):
            expected, found = p.detach() - old_p, q.detach() - old_q
            worst = max(worst, float((found - expected).norm() / expected.norm()))
            torch.testing.assert_close(
                ours.state[q]["momentum_buffer"],
                theirs.state[p]["momentum_buffer"],
                rtol=1e-5,
                atol=1e-7,
            )
            with torch.no_grad():
                q.copy_(p)  # so that each step is compared by itself
    return worst


@pytest.mark.parametrize(
    "change",
    [
        {"scale": "match_rms_adamw"},
        {"lr": 1.1e-3},
        {"weight_decay": 5.0},
        {"nesterov": False},
        {"steps": 4},
    ],
    ids=str,
)
def test_the_tolerance_rejects_other_options(change: dict[str, Any]) -> None:
    theirs, params = trained(torch.optim.Muon)
    others = clones(params)
    ours = Muon(others)
    ours.load_state_dict(theirs.state_dict())
    ours.param_groups[0].update(change)
    assert go_on_together(theirs, params, ours, others) > 2 * TOLERANCE


@pytest.mark.parametrize(
    ("cls", "options", "more"),
    [
        (Muon, {"normalize": "row"}, {"row_moment"}),
        (Muon, {"matrix_layout": "per_expert", "keep_norm": True}, {"norm"}),
        (
            SOAPMuon,
            {"sides": "both", "precondition_frequency": 2},
            {"exp_avg_sq", "factor_0", "factor_1", "basis_0", "basis_1"},
        ),
        (Muon, {"state_dtype": torch.bfloat16, "momentum": 0.9}, set()),
    ],
    ids=["normuon", "keep_norm", "soap_muon", "bf16"],
)
def test_entries_that_torchs_muon_does_not_keep_begin_at_their_initial_values(
    cls: Any,
    options: dict[str, Any],
    more: set[str],
) -> None:
    theirs, params = trained(torch.optim.Muon)
    ours, fresh = cls(clones(params), **options), cls(clones(params), **options)
    ours.load_state_dict(theirs.state_dict())
    fresh.init_state()
    for p, q, other in zip(
        params,
        *(one.param_groups[0]["params"] for one in (ours, fresh)),
        strict=True,
    ):
        assert (
            ours.state[q].keys()
            == {
                "step",
                "momentum_buffer",
                *more,
            }
            == fresh.state[other].keys()
        )
        for name, x in ours.state[q].items():
            expected = (
                theirs.state[p][name].to(
                    x.dtype,
                )
                if name == "momentum_buffer"
                else fresh.state[other][name]
            )
            assert torch.equal(x, expected), name
    run(ours, ours.param_groups[0]["params"], range(3, 8))
    again = cls(clones(params), **options)
    again.load_state_dict(through_a_file(ours.state_dict()))


class JordansMuon(torch.optim.Optimizer):
    """The state, groups and momentum of Jordan's SingleDeviceMuonWithAuxAdam; its steps are not
    needed here."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if group["use_muon"]:
                    state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(
                        p.grad,
                        1 - group["momentum"],
                    )
                else:
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(
                        p.grad,
                        1 - group["betas"][0],
                    )
                    state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(
                        p.grad.square(),
                        1 - group["betas"][1],
                    )


def test_a_run_of_jordans_muon_goes_on() -> None:
    params = parameters([(6, 4), (5,)])
    muon = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.5, "use_muon": True}
    adam = {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False}
    theirs = JordansMuon([{"params": params[:1], **muon}, {"params": params[1:], **adam}])
    run(theirs, params, range(3))
    others = clones(params)
    ours = Muon([{"params": others[:1]}, {"params": others[1:], "rule": "adamw"}])
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    first, second = ours.param_groups
    assert [
        first[key]
        for key in (
            "lr",
            "momentum",
            "weight_decay",
            "scale",
            "steps",
            "nesterov",
        )
    ] == [0.02, 0.9, 0.5, "spectral", 5, True]
    assert [second[key] for key in ("lr", "betas", "eps", "weight_decay")] == [
        3e-4,
        (0.8, 0.95),
        1e-10,
        0.0,
    ]
    assert torch.equal(
        ours.state[others[0]]["momentum_buffer"],
        theirs.state[params[0]]["momentum_buffer"],
    )
    assert torch.equal(ours.state[others[1]]["exp_avg_sq"], theirs.state[params[1]]["exp_avg_sq"])
    assert float(ours.state[others[1]]["step"]) == 3.0
    swapped = Muon([{"params": others[:1], "rule": "adamw"}, {"params": others[1:]}])
    with pytest.raises(
        ValueError, match=r"parameter 0 with shape .* is of another optimizer \(momentum_buffer\)"
    ):
        swapped.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_a_run_of_torchs_adamw_goes_on(cls: Any) -> None:
    """Under AdamW, and for the vectors of every rule."""
    theirs, params = trained(cls, [(6, 4), (5,)], lr=0.01, weight_decay=0.0)
    others = clones(params)
    ours = AdamW(others)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    for step in range(3, 6):
        give_gradients(params, step)
        copy_gradients(params, others)
        theirs.step()
        ours.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6)


# --- what cannot be taken -------------------------------------------------------------------------


def saved_by(cls: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    def save() -> dict[str, Any]:
        saved: dict[str, Any] = trained(cls, **options)[0].state_dict()
        return saved

    return save


REFUSED: dict[str, tuple[Any, Callable[[], dict[str, Any]], str]] = {
    "muon_into_adamw": (
        AdamW,
        saved_by(torch.optim.Muon),
        r"is of another optimizer \(momentum_buffer\), .* 'adamw' can take nothing: .* for Muon",
    ),
    "muon_into_soap": (
        SOAP,
        saved_by(torch.optim.Muon),
        r"\(momentum_buffer\), from which the rule 'soap' can take nothing",
    ),
    "muon_of_other_coefficients": (
        Muon,
        saved_by(torch.optim.Muon, ns_coefficients=(2.0, -1.5, 0.5)),
        r"ns_coefficients=.*Lather takes \(3\.4445",
    ),
    "sgd": (
        Muon,
        saved_by(torch.optim.SGD, momentum=0.9),
        r"\(momentum_buffer\), from which the rule 'muon' can take nothing: .* load the weights",
    ),
    "adamw_into_muon": (
        Muon,
        saved_by(torch.optim.AdamW),
        r"is of another optimizer \(step, exp_avg, exp_avg_sq\), .* adamw for Adam",
    ),
    "amsgrad": (
        AdamW,
        saved_by(torch.optim.AdamW, amsgrad=True),
        r"is of another optimizer \(.*max_exp_avg_sq\)",
    ),
    "coupled_adam": (
        AdamW,
        saved_by(torch.optim.Adam, weight_decay=0.1),
        r"decoupled_weight_decay=False .* \"weight_decay_method\"",
    ),
    "rmsprop": (
        AdamW,
        saved_by(torch.optim.RMSprop),
        r"is of another optimizer \(step, square_avg\), .* load the weights alone",
    ),
    "adagrad": (KLSOAP, saved_by(torch.optim.Adagrad), r"is of another optimizer \(step, sum\)"),
    "other_shapes": (
        Muon,
        saved_by(torch.optim.Muon, shapes=[SHAPES[1], *SHAPES[1:]]),
        r"momentum_buffer \(12, 16\), expected \(16, 12\)",
    ),
}


@pytest.mark.parametrize(("cls", "save", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_is_refused_by_name_and_nothing_changes(
    cls: Any,
    save: Callable[[], dict[str, Any]],
    message: str,
) -> None:
    params = parameters(SHAPES)
    optimizer: MatrixOptimizer = cls(params, lr=1e-2)
    run(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    before, groups = (
        snapshot(optimizer, params),
        copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups]),
    )
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(save())
    assert all_same(snapshot(optimizer, params), before)
    assert [{**group, "params": None} for group in optimizer.param_groups] == groups
    assert same_state(optimizer, params, twin, twin.param_groups[0]["params"])


def test_an_empty_state_of_another_optimizer_brings_its_options() -> None:
    ours = Muon([parameter(4, 4)])
    ours.load_state_dict(torch.optim.Muon([parameter(4, 4)], lr=0.25).state_dict())
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["scale"]) == (0.25, "spectral")
    with pytest.warns(UserWarning, match="betas, eps"):
        ours.load_state_dict(torch.optim.AdamW([parameter(4, 4)], lr=0.125).state_dict())
    assert ours.param_groups[0]["lr"] == 0.125


def test_a_loaded_group_keeps_the_keys_that_other_optimizers_do_not_save() -> None:
    """torch replaces a group by the saved one; what is said of shards and bases is the optimizer's
    own."""
    p = parameter(4, 4)
    ours = SOAP([{"params": [p], "rule": "muon", "sides": "smaller", "layer_id": 3}])
    theirs = torch.optim.Muon([parameter(4, 4)])
    ours.load_state_dict(theirs.state_dict())
    assert (ours.param_groups[0]["layer_id"], ours.param_groups[0]["sides"]) == (3, "smaller")
    assert isinstance(ours.param_groups[0]["params"][0], Tensor)
