"""State that other optimizers have saved: a run of torch.optim.Muon or AdamW goes on. (What cannot
be taken is in `mistakes.txt`.)"""

import logging
from typing import Any

import pytest
import torch
from optim_helpers import Run, clones, copy_gradients, give_gradients, run_of, through_a_file
from torch import Tensor

from lather.optim import SOAP, AdaMuon, AdamW, Muon, Scion, SOAPMuon
from lather.optim.batched.muonium import from_muonium

SHAPES = [(16, 12), (12, 16), (16, 16)]

TOLERANCE = 0.04
"""Largest difference between an update of torch's Muon, which iterates in bf16, and the same
update, relative to its norm."""

MUON: dict[str, dict[str, Any]] = {
    "default": {"lr": 1e-3},
    "as_adamw": {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "original": {
        **{"adjust_lr_fn": "original", "momentum": 0.8, "weight_decay": 0.0, "lr": 0.05},
        "ns_steps": 3,
    },
}


def trained(cls: Any, shapes: Any = SHAPES, **options: Any) -> Run:
    a = run_of(cls, shapes, **options)
    a.steps(range(3))
    return a


def going_on(a: Run, cls: Any, **options: Any) -> Run:
    """Load the state of another optimizer into one of ours, of equal weights."""
    params = clones(a.params)
    b = Run(cls(params, **options), params)
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    return b


@pytest.mark.parametrize("options", MUON.values(), ids=MUON)
def test_a_run_of_torchs_muon_goes_on(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Momentum goes on to rounding, and the updates agree to the error of torch's bf16; the next
    test shows that no other scale, rate, decay or number of steps would."""
    a = trained(torch.optim.Muon, **options)
    with caplog.at_level(logging.WARNING, logger="lather"):
        b = going_on(a, Muon, lr=1.0, momentum=0.1)
    assert "momentum_buffer and options of another Muon were taken for 3 parameters" in caplog.text
    assert {"ns_steps", "ns_coefficients", "adjust_lr_fn", "eps"}.isdisjoint(b.groups[0])
    for i in range(3):
        assert torch.equal(a.state(i)["momentum_buffer"], b.state(i)["momentum_buffer"])
        assert float(b.state(i)["step"]) == 0.0
    assert largest_difference_of_steps(a, b) < TOLERANCE


def largest_difference_of_steps(a: Run, b: Run) -> float:
    """Take four steps of both with the same gradients, and return the largest difference of a
    step, relative to the step. Momenta must agree to rounding."""
    worst = 0.0
    for step in range(3, 7):
        give_gradients(a.params, step)
        copy_gradients(a.params, b.params)
        before = clones(a.params)
        a.optimizer.step()
        b.optimizer.step()
        for i, (p, q, old) in enumerate(zip(a.params, b.params, before, strict=True)):
            expected, difference = (p - old).detach(), (q - p).detach()
            worst = max(worst, float(difference.norm() / expected.norm()))
            momenta = (one.state(i)["momentum_buffer"] for one in (b, a))
            torch.testing.assert_close(*momenta, rtol=1e-5, atol=1e-7)
            q.data.copy_(p.data)  # so that each step is compared by itself
    return worst


@pytest.mark.parametrize(
    "change",
    [
        *({"scale": "match_rms_adamw"}, {"lr": 1.1e-3}, {"weight_decay": 5.0}, {"nesterov": False}),
        {"steps": 4},
    ],
    ids=str,
)
def test_the_tolerance_rejects_other_options(change: dict[str, Any]) -> None:
    a = trained(torch.optim.Muon, lr=1e-3)
    b = going_on(a, Muon)
    b.groups[0].update(change)
    assert largest_difference_of_steps(a, b) > 2 * TOLERANCE


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
    cls: Any, options: dict[str, Any], more: set[str]
) -> None:
    a = trained(torch.optim.Muon)
    b, fresh = going_on(a, cls, **options), run_of(cls, SHAPES, **options)
    fresh.optimizer.init_state()
    for i in range(3):
        assert b.state(i).keys() == {"step", "momentum_buffer", *more} == fresh.state(i).keys()
        for name, x in b.state(i).items():
            source = a if name == "momentum_buffer" else fresh
            assert torch.equal(x, source.state(i)[name].to(x.dtype)), name
    b.steps(range(3, 8))
    going_on(b, cls, **options)


@pytest.mark.parametrize("whose", ["torch", "jordan"])
@pytest.mark.parametrize("cls", [Muon, SOAPMuon])
def test_a_run_of_another_muon_goes_on_in_8_bits(cls: Any, whose: str) -> None:
    shapes: Any = [(64, 96), (16, 12)]
    if whose == "torch":
        a = trained(torch.optim.Muon, shapes)
    else:
        params = run_of(Muon, shapes).params
        group = {"params": params, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.5}
        a = Run(JordansMuon([{**group, "use_muon": True}]), params)
        a.steps(range(3))
    b = going_on(a, cls, state_dtype=torch.int8)
    fresh = run_of(cls, shapes, state_dtype=torch.int8)
    fresh.optimizer.init_state()
    for i, p in enumerate(b.params):
        x = a.state(i)["momentum_buffer"]
        of_state = b.optimizer.formats()[p]
        decoded = of_state["momentum_buffer"].decode(b.state(i), torch.float32)
        assert (decoded - x).abs().max() <= 2**-5 * x.abs().max() * (i == 0)
        assert b.state(i).keys() == fresh.state(i).keys()
        own = of_state["momentum_buffer"].stored
        for name in b.state(i).keys() - own:
            assert torch.equal(b.state(i)[name], fresh.state(i)[name]), name
    b.steps(range(3, 5))
    again = clones(b.params)
    cls(again, state_dtype=torch.int8).load_state_dict(through_a_file(b.optimizer.state_dict()))


class JordansMuon(torch.optim.Optimizer):
    """The state, groups and momentum of Jordan's SingleDeviceMuonWithAuxAdam; its steps are not
    needed here."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            names = ["momentum_buffer"] if group["use_muon"] else ["exp_avg", "exp_avg_sq"]
            rates = [group["momentum"]] if group["use_muon"] else group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not group["use_muon"]:
                    state["step"] = state.get("step", 0) + 1
                for power, (name, rate) in enumerate(zip(names, rates, strict=True), 1):
                    x = state.setdefault(name, torch.zeros_like(p))
                    x.lerp_(p.grad**power, 1 - rate)


def test_a_run_of_jordans_muon_goes_on() -> None:
    params = run_of(AdamW, [(6, 4), (5,)]).params
    muon = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.5}
    adam = {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    groups = [
        {"params": params[:1], **muon, "use_muon": True},
        {"params": params[1:], **adam, "use_muon": False},
    ]
    a = Run(JordansMuon(groups), params)
    a.steps(range(3))
    others = clones(params)
    b = Run(Muon([{"params": others[:1]}, {"params": others[1:], "rule": "adamw"}]), others)
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    first, second = b.groups
    expected = {**muon, "scale": "spectral", "steps": 5, "nesterov": True}
    assert {key: first[key] for key in expected} == expected
    assert {key: second[key] for key in adam} == adam
    for i, name in ((0, "momentum_buffer"), (1, "exp_avg_sq")):
        assert torch.equal(b.state(i)[name], a.state(i)[name])
    assert float(b.state(1)["step"]) == 3.0
    swapped = Muon([{"params": others[:1], "rule": "adamw"}, {"params": others[1:]}])
    with pytest.raises(ValueError, match=r"parameter 0 with shape .* is of another optimizer"):
        swapped.load_state_dict(a.optimizer.state_dict())


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_a_run_of_torchs_adamw_goes_on(cls: Any) -> None:
    """Under AdamW, and for the vectors of every rule."""
    a = trained(cls, [(6, 4), (5,)], lr=0.01, weight_decay=0.0)
    b = going_on(a, AdamW)
    for step in range(3, 6):
        give_gradients(a.params, step)
        copy_gradients(a.params, b.params)
        a.optimizer.step()
        b.optimizer.step()
    for p, q in zip(a.params, b.params, strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6)


def test_an_empty_state_of_another_optimizer_brings_its_options() -> None:
    b = run_of(Muon, [(4, 4)])
    b.optimizer.load_state_dict(run_of(torch.optim.Muon, [(4, 4)], lr=0.25).optimizer.state_dict())
    assert (b.groups[0]["lr"], b.groups[0]["scale"]) == (0.25, "spectral")
    theirs = run_of(torch.optim.AdamW, [(4, 4)], lr=0.125).optimizer.state_dict()
    with pytest.warns(UserWarning, match="betas, eps"):
        b.optimizer.load_state_dict(theirs)
    assert b.groups[0]["lr"] == 0.125


def saved_by(key: Any, **options: Any) -> dict[str, Any]:
    """Make a saved optimizer of one matrix, whose state has one entry."""
    group = {"lr": 1e-3, "weight_decay": 0.0, **options, "params": [0]}
    return {
        "state": {0: {key: torch.ones(4, 4)}} if key is not None else {},
        "param_groups": [group],
    }


@pytest.mark.parametrize(
    ("cls", "saved", "message"),
    [
        (
            Muon,
            saved_by(None, momentum=0.0, dampening=0),
            "group 0 .with dampening, .* alone 'muon'",
        ),
        (SOAP, saved_by("Q", shampoo_beta=None), "is of another optimizer, whose options .*=None"),
        (SOAP, saved_by(0), r"is of another optimizer \(0\)"),
    ],
    ids=["sgd_without_momentum", "soap_of_pytorch_optimizer", "heavyball"],
)
def test_what_is_not_taken_is_refused_with_the_remedy(
    cls: Any, saved: dict[str, Any], message: str
) -> None:
    """In the forms of other libraries (`tests/integrations` has the libraries themselves)."""
    ours = run_of(cls, [(4, 4)]).optimizer
    before = ours.state_dict()
    with pytest.raises(ValueError, match=f"(?s){message}.*oad the weights alone"):
        ours.load_state_dict(saved)
    assert ours.state_dict() == before


@pytest.mark.parametrize("cls", [AdaMuon, Scion])
def test_a_rule_with_other_steps_does_not_go_on_with_muons_state(cls: type[Muon]) -> None:
    (p,) = run_of(AdamW, [(4, 4)]).params
    ours, theirs = cls([p]), run_of(torch.optim.Muon, [(4, 4)])
    theirs.steps(range(1))
    before = ours.state_dict()
    with pytest.raises(ValueError, match="is of another optimizer"):
        ours.load_state_dict(theirs.optimizer.state_dict())
    assert ours.state_dict() == before


def test_a_loaded_group_keeps_the_keys_that_other_optimizers_do_not_save() -> None:
    """torch replaces a group by the saved one; what is said of shards and bases is the optimizer's
    own."""
    (p,) = run_of(AdamW, [(4, 4)]).params
    ours = SOAP([{"params": [p], "rule": "muon", "sides": "smaller", "layer_id": 3}])
    ours.load_state_dict(run_of(torch.optim.Muon, [(4, 4)]).optimizer.state_dict())
    assert (ours.param_groups[0]["layer_id"], ours.param_groups[0]["sides"]) == (3, "smaller")
    assert isinstance(ours.param_groups[0]["params"][0], Tensor)


def test_a_state_of_muonium_from_before_some_of_its_options_has_its_defaults() -> None:
    """Compare two states; tests/integrations/test_muonium.py has the package itself."""
    state = {"momentum_buffer": torch.ones(4, 8), "lr_ratio": torch.ones(())}
    group = {"algorithm": "muon", "use_muon": True, "wd": 0.1, "lr": 0.02, "momentum": 0.9}
    options = {"use_cautious_wd": True, "orthogonalization_strategy": "polar_express"}
    new, old = (
        from_muonium({"state": {0: state}, "param_groups": [{**group, "params": [0], **more}]})
        for more in (options, {})
    )
    assert old["param_groups"] == new["param_groups"]
    assert old["param_groups"][0]["cautious_decay"] is True
    assert old["param_groups"][0]["ns_coefficients"] == "polar_express"


@pytest.mark.parametrize("shape", [(1, 8), (1, 1)], ids=str)
def test_own_state_with_sides_of_one_is_not_called_foreign(
    shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """A factor of one row is the same packed and whole."""
    a = trained(SOAP, [shape])
    with caplog.at_level(logging.WARNING):
        going_on(a, SOAP)
    assert "another Muon" not in caplog.text
