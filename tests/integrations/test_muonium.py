"""A run of the package muonium goes on: its optimizer has Muon for matrices and AdamW for the
rest."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.integrations
muonium = pytest.importorskip("muonium")

from muonium.orthogonalize import orthogonalize as theirs

from lather.optim import Muon

MATRICES = ((12, 16), (16, 16), (3, 6, 8))
TALL = (16, 12)
VECTOR = (5,)
TOLERANCE = {"newton_schulz": 0.05, "polar_express": 0.1}
"""Largest difference of a step, relative to it. muonium iterates in bf16, and its polar_express has
other safety factors."""


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run its loops without the kernel, which needs CUDA, and without compiling."""
    monkeypatch.setattr(theirs, "ns_loop_triton", theirs.ns_loop)
    monkeypatch.setattr(theirs, "pe_loop_triton", theirs.pe_loop)
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def groups_of(params: list[nn.Parameter], **key: Any) -> list[dict[str, Any]]:
    return [{"params": params[:-1]}, {"params": params[-1:], **key}]


def trained(params: list[nn.Parameter], **options: Any) -> Any:
    groups = groups_of(params, algorithm="adamw", lr=3e-3)
    optimizer = muonium.Muon(groups, lr=2e-2, momentum=0.9, **options)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    return optimizer


def going_on(a: Any, params: list[nn.Parameter]) -> tuple[Muon, list[nn.Parameter]]:
    others = [nn.Parameter(p.detach().clone()) for p in params]
    b = Muon(groups_of(others, rule="adamw"), matrix_layout="per_expert")
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    return b, others


def largest_difference(
    a: Any, params: list[nn.Parameter], b: Muon, others: list[nn.Parameter]
) -> float:
    """Take four steps of both; return the largest difference of a step relative to it."""
    worst = 0.0
    for step in range(3, 7):
        before: list[Tensor] = [p.detach().clone() for p in params]
        for optimizer, of_it in ((a, params), (b, others)):
            give_gradients(of_it, step)
            optimizer.step()
        for p, q, old in zip(params, others, before, strict=True):
            worst = max(worst, float((q - p).norm().detach() / (p - old).norm().detach()))
            q.data.copy_(p.data)
    return worst


@pytest.mark.parametrize(
    ("strategy", "cautious", "decay"),
    [("newton_schulz", True, 0.02), ("newton_schulz", False, 0.5), ("polar_express", False, 0.5)],
)
def test_a_run_goes_on(strategy: str, cautious: bool, decay: float) -> None:
    """With cautious decay, an update that is about 0 may have another sign in bf16."""
    params = parameters(*MATRICES, VECTOR)
    options = {"orthogonalization_strategy": strategy, "use_cautious_wd": cautious}
    a = trained(params, wd=decay, **options)
    b, others = going_on(a, params)
    expected = {"lr": 0.02, "momentum": 0.9, "weight_decay": decay, "scale": "spectral", "steps": 5}
    expected |= {"cautious_decay": cautious, "nesterov": True}
    assert {key: b.param_groups[0][key] for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value
        for key, value in expected.items()
    }
    assert largest_difference(a, params, b, others) < TOLERANCE[strategy]


@pytest.mark.parametrize(
    "change", [{"momentum": 0.5}, {"lr": 0.023}, {"weight_decay": 9.0}, {"scale": 1.2}], ids=str
)
def test_the_tolerance_rejects_other_options(change: dict[str, Any]) -> None:
    params = parameters(*MATRICES, VECTOR)
    a = trained(params, wd=0.5, orthogonalization_strategy="newton_schulz")
    b, others = going_on(a, params)
    b.param_groups[0].update(change)
    assert largest_difference(a, params, b, others) > 1.5 * TOLERANCE["newton_schulz"]


def test_the_decay_of_tall_matrices_is_lower_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for wd, warns in ((0.0, False), (0.1, True)):
        caplog.clear()
        params = parameters(TALL, VECTOR)
        a = trained(params, wd=wd, orthogonalization_strategy="newton_schulz")
        with caplog.at_level(logging.WARNING, logger="lather"):
            b, others = going_on(a, params)
        assert ("longer than wide" in caplog.text) == warns
        if not warns:
            assert largest_difference(a, params, b, others) < TOLERANCE["newton_schulz"]


def test_what_no_rule_does_is_refused() -> None:
    params = parameters((8, 8), VECTOR)
    a = trained(params)
    saved = a.state_dict()
    saved["param_groups"][0]["algorithm"] = "normuon"
    with pytest.raises(ValueError, match=r"saved group 0 of muonium has algorithm='normuon'"):
        Muon(groups_of(params, rule="adamw")).load_state_dict(saved)
    saved = a.state_dict()
    saved["param_groups"][0]["split_sizes"] = (4, 4)
    with pytest.raises(ValueError, match=r"has split_sizes=\(4, 4\)"):
        Muon(groups_of(params, rule="adamw")).load_state_dict(saved)
    saved = a.state_dict()
    saved["param_groups"][1]["amsgrad"] = True
    with pytest.raises(ValueError, match="has amsgrad=True"):
        Muon(groups_of(params, rule="adamw")).load_state_dict(saved)
