"""Groups of pytorch_optimizer's Muon, which chooses the rule of a group by `use_muon`."""

import pytest

pytestmark = pytest.mark.integrations
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

from optim_helpers import parameter

from lather.optim import Muon


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
