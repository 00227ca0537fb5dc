"""The registry of NVIDIA's Emerging-Optimizers, from which Megatron-style trainers take optimizers
by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integrations
registry = pytest.importorskip("emerging_optimizers.registry")

from lather.optim import SOAP, Muon, parameter_groups


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the classes as the page does, and take them out again."""
    monkeypatch.setattr(registry, "_OPTIMIZERS", dict(registry._OPTIMIZERS))
    for name, cls in {"lather_soap": SOAP, "lather_muon": Muon}.items():
        assert registry.register_optimizer(name)(cls) is cls
    return


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def test_an_optimizer_by_name_takes_the_steps_of_its_class() -> None:
    options = {"lr": 4e-3, "precondition_frequency": 2, "second_moment": "rotate"}
    assert {"lather_soap", "lather_muon"} <= set(registry.get_optimizer_name_list())
    make = registry.get_configured_optimizer_cls("lather_soap", **options)
    ours, theirs = build(), build()
    pairs = [
        (ours, SOAP(parameter_groups(ours, rest_lr=3e-2), **options)),
        (theirs, make(parameter_groups(theirs, rest_lr=3e-2))),
    ]
    assert type(pairs[1][1]) is SOAP
    for step in range(5):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in pairs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_registry_knows_the_options() -> None:
    """It compares the names with those of the class's signature."""
    with pytest.raises(TypeError, match=r"'Muon' does not accept arguments: \{'momentun'\}"):
        registry.get_configured_optimizer_cls("lather_muon", momentun=0.9)
    with pytest.raises(ValueError, match="already registered"):
        registry.register_optimizer("lather_soap")(SOAP)
