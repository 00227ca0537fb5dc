"""torchtitan from 0.3 on, whose configuration names an optimizer for each pattern of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integrations
pytest.importorskip("torchtitan.components.optimizer.lr_scheduler")  # not in 0.2

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from lather.optim import SOAP, Muon

OURS: dict[str, Any] = {"Muon": Muon, "SOAP": SOAP}
ADAMW = {"rule": "adamw", "lr": 3e-2}


class LatherOptimizers(OptimizersContainer):  # type: ignore[misc, type-arg]
    """As on the page."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return OURS.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))


def container(model: nn.Module, name: str, **options: Any) -> LatherOptimizers:
    rest = ParamGroupConfig(pattern=r"3\.|bias", optimizer_name=name, optimizer_kwargs=ADAMW)
    matrices = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=options)
    groups = [rest, matrices]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return LatherOptimizers(config, model_parts=[model])


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "options"),
    [("Muon", {"lr": 1e-2, "momentum": 0.9}), ("SOAP", {"lr": 4e-3, "precondition_frequency": 2})],
)
def test_a_name_makes_our_optimizer_and_its_flat_state_goes_on(
    name: str, options: dict[str, Any]
) -> None:
    ours, theirs = build(), build()
    optimizers = container(theirs, name, **options)
    assert [type(each) for each in optimizers] == [OURS[name]]
    rest = [p for n, p in ours.named_parameters() if n[0] == "3" or "bias" in n]
    matrices = [p for n, p in ours.named_parameters() if n[0] != "3" and "weight" in n]
    plain = OURS[name]([{"params": rest, **ADAMW}, {"params": matrices, **options}])
    train(ours, plain, range(6))
    train(theirs, optimizers, range(3))
    resumed = build()
    resumed.load_state_dict(theirs.state_dict())
    again = container(resumed, name, **options)
    again.load_state_dict(optimizers.state_dict())
    train(resumed, again, range(3, 6))
    for p, q in zip(ours.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
