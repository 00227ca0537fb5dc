"""Parameter groups that were made for other optimizers: torch's, and Lather's own with other
default rules."""

import re
import warnings
from typing import Any

import pytest
import torch
from optim_helpers import all_same, clones, make, parameter, parameters, run, run_both

from lather.optim import KLSOAP, SOAP, AdamW, EmbeddingSOAP, Muon, SOAPMuon, parameter_groups


@pytest.mark.parametrize("given", [{}, {"betas": (0.5, 0.75)}])
def test_groups_of_an_optimizer_with_several_rules_are_taken_by_another_one(
    given: dict[str, Any],
) -> None:
    """torch copies the optimizer's defaults into every group, and schedulers turn them there; they
    are inert where the group's rule has no such options."""
    params = parameters([(4, 4), (4, 4), (3,)])
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "rule": "muon"},
        {"params": params[2:], "rule": "adamw"},
    ]
    first = SOAP(groups, lr=1e-2, **given)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=10)
    for step in range(3):
        run(first, params, range(step, step + 1))
        scheduler.step()
    others = clones(params)
    for cls in (SOAP, Muon, KLSOAP):
        given_groups = [
            {**group, "params": [p]}
            for group, p in zip(
                first.param_groups,
                others,
                strict=True,
            )
        ]
        second = cls(given_groups, lr=1e-2)
        assert [group["rule"] for group in second.param_groups] == ["soap", "muon", "adamw"]
        second.load_state_dict(first.state_dict())
        run(second, others, range(2))
    with pytest.raises(ValueError, match=r"betas=.* is an option of"):
        first.add_param_group({"params": [parameter(4, 4)], "rule": "muon", "betas": (0.1, 0.2)})


def test_every_optimizer_takes_the_groups_of_parameter_groups(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4),
        torch.nn.Linear(4, 6),
        torch.nn.LayerNorm(6),
    )
    for cls in (SOAP, KLSOAP, EmbeddingSOAP, Muon, SOAPMuon, AdamW):
        cls(parameter_groups(model, rest_lr=0.1), lr=1e-2)
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]


def test_groups_of_torchs_optimizers() -> None:
    """A whole group of Adam's is taken, and what it asks for in vain is named. Muon's is refused
    until `scale` says its factor."""
    p = parameter(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for theirs in (
            torch.optim.AdamW([p]),
            torch.optim.Adam([p]),
            torch.optim.NAdam([p], decoupled_weight_decay=True),
        ):
            kept = {**theirs.param_groups[0]}
            kept.pop("momentum_decay", None)
            assert AdamW([kept]).param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.warns(UserWarning, match="ignored: betas, eps$"):
        Muon(torch.optim.AdamW([p]).param_groups)
    with pytest.raises(ValueError, match="amsgrad=True"):
        AdamW(torch.optim.AdamW([p], amsgrad=True).param_groups)
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        AdamW(torch.optim.Adam([p], weight_decay=0.1).param_groups)
    (group,) = torch.optim.Muon([p]).param_groups
    with pytest.raises(ValueError, match=re.escape("adjust_lr_fn=None")):
        Muon([group])
    assert Muon([{**group, "scale": "spectral"}]).param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("kind", ["muon", "soap", "adamw"])
def test_a_key_that_is_added_later_changes_nothing(kind: str) -> None:
    params, others = parameters([(4, 4)]), parameters([(4, 4)])
    ours, plain = make(kind, params), make(kind, others)
    run_both((ours, params), (plain, others), range(2))
    ours.param_groups[0] |= {"swa_lr": 0.1, "lr_scale": 0.5, "foreach": True}
    run_both((ours, params), (plain, others), range(2, 4))
    assert all_same(params, others)
