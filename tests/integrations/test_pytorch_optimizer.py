"""Groups and states of other packages' Muon and SOAP, which choose rules by keys of their own."""

import copy
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integrations
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

from optim_helpers import parameter

from lather.optim import SOAP, AdamW, Muon


def test_groups_of_pytorch_optimizers_muon() -> None:
    """They choose the rule by `use_muon`, and have Jordan's factor. With the rules and options
    that the errors name they are taken."""
    matrix, vector = parameter(4, 4), parameter(4)
    groups = [{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]
    muon, adamw = (dict(group) for group in pytorch_optimizer.Muon(groups).param_groups)
    with pytest.raises(ValueError, match=r"use_adjusted_lr=False .* \"scale\": \"spectral\""):
        Muon([muon])
    with pytest.raises(ValueError, match=r"betas=.* is an option of adamw"):
        Muon([{**muon, "scale": "spectral"}, adamw])
    with pytest.warns(UserWarning, match="ignored: ns_reset_steps$"):
        ours = Muon([{**muon, "scale": "spectral"}, {**adamw, "rule": "adamw"}])
    assert [(group["rule"], group["lr"]) for group in ours.param_groups] == [
        ("muon", 0.02),
        ("adamw", 0.0003),
    ]


@pytest.mark.parametrize("name", ["Lookahead", "OrthoGrad", "ScheduleFreeWrapper"])
def test_optimizers_around_ours_go_on_after_a_load(name: str) -> None:
    """They keep values of their own in our groups, too."""
    runs = []
    for loads in (False, True):
        p = parameter(8, 12)
        wrap = getattr(pytorch_optimizer, name)
        optimizer = wrap(Muon([p], lr=0.02))
        for step in range(8):
            if loads and step == 4:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = wrap(Muon([p], lr=0.02))
                optimizer.load_state_dict(saved)
            if step in (0, 4):
                getattr(optimizer, "train", lambda: None)()
            p.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        runs.append(p.detach().clone())
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], parameter(8, 12))


def test_sam_around_ours_takes_two_steps() -> None:
    p = parameter(8, 12)
    before = p.detach().clone()
    optimizer = pytorch_optimizer.SAM([p], Muon, lr=0.02)
    for _ in range(3):
        for step in (optimizer.first_step, optimizer.second_step):
            p.square().sum().backward()
            step(zero_grad=True)
    assert not torch.equal(p, before)
    optimizer.load_state_dict(optimizer.state_dict())


def refused(theirs: type[Any], ours: type[Any], **options: Any) -> str:
    """Return what is said of a state of another package's optimizer."""
    p = parameter(8, 12)
    optimizer = theirs([{"params": [p], **options}], lr=1e-3)
    for _ in range(2):
        p.grad = torch.randn(8, 12)
        optimizer.step()
    fresh = ours([parameter(8, 12)])
    before = fresh.state_dict()
    with pytest.raises(ValueError, match="oad the weights alone") as error:
        fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state_dict() == before
    return str(error.value)


def test_states_of_pytorch_optimizer_are_refused() -> None:
    said = refused(pytorch_optimizer.Muon, Muon, use_muon=True)
    assert "is of another optimizer than torch.optim.Muon" in said
    said = refused(pytorch_optimizer.SOAP, SOAP, precondition_frequency=1)
    assert "is of another optimizer, whose options the rule 'soap' cannot take" in said
    said = refused(pytorch_optimizer.AdaMuon, Muon, use_muon=True)
    assert "is of another optimizer (m, v)" in said


@pytest.mark.parametrize(("name", "ours"), [("SOAP", SOAP), ("Muon", Muon), ("AdamW", AdamW)])
def test_states_of_heavyball_are_refused(name: str, ours: Any) -> None:
    heavyball = pytest.importorskip("heavyball")
    with torch.compiler.set_stance("force_eager"):
        assert "is of another optimizer (0)" in refused(getattr(heavyball, name), ours)
