"""The first preconditioned updates do not blow up: rms(U) on independent Gaussian gradients, the
hardest case for a cold start."""

from typing import Any

import pytest
import torch
from optim_helpers import give_gradients

from lather.optim import KLSOAP, REKLS, SOAP, Muon, SOAPMuon, StackedSOAP

SHAPES = [(64, 64), (64, 16), (256, 64), (16, 64)]
STACKS = [(4, 64, 16), (4, 16, 64), (3, 64, 64), (16, 16, 4)]


def largest_rms(cls: Any, shape: tuple[int, ...], steps: int, **options: Any) -> float:
    """Return the largest rms of U over the first steps, read from the parameter's movement."""
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = cls([p], lr=1.0, weight_decay=0.0, **options)
    largest = 0.0
    for step in range(steps):
        before = p.detach().clone()
        give_gradients([p], step)
        optimizer.step()
        largest = max(largest, float((p.detach() - before).square().mean().sqrt()))
    return largest


ROTATED: dict[str, Any] = {"second_moment": "rotate", "precondition_frequency": 1}
ONE_BY_ONE: dict[str, Any] = {"stagger_refresh": True, "stagger_first": True}
ITERATED: dict[str, Any] = {"first_bases": "iteration", "refresh_method": "root_qr"}
FIFTY, TWELVE = (50, 0.5, 1.5), (12, 0.14, 0.24)
"""Number of steps, and the bounds of the largest update. Orthogonalized updates have the size of
AdamW's, 0.2, times the 0.7 to 1.2 that five steps of Newton-Schulz leave of singular values."""


@pytest.mark.parametrize(
    ("cls", "options", "bounds"),
    [
        *((KLSOAP, options, FIFTY) for options in ({}, ITERATED)),
        (KLSOAP, {"precondition_frequency": 10, **ONE_BY_ONE}, FIFTY),
        (REKLS, {}, FIFTY),
        (SOAP, {"second_moment": "rotate", **ONE_BY_ONE}, FIFTY),
        *((cls, ROTATED, (20, 0.5, 1.01)) for cls in (SOAP, KLSOAP)),
        *((cls, {**ROTATED, **ITERATED}, (20, 0.5, 1.01)) for cls in (SOAP, KLSOAP)),
        *((Muon, options, TWELVE) for options in ({}, {"normalize": "row"})),
        *((SOAPMuon, options, TWELVE) for options in ({}, {"sides": "both"})),
        (SOAP, {"orthogonalize": True}, TWELVE),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_updates_stay_bounded(
    cls: Any, options: dict[str, Any], bounds: tuple[int, float, float], shape: tuple[int, int]
) -> None:
    steps, least, most = bounds
    assert least < largest_rms(cls, shape, steps, **options) <= most


@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_the_first_updates_of_stacked_experts_stay_bounded(shape: tuple[int, ...]) -> None:
    assert 0.5 < largest_rms(StackedSOAP, shape, 50) <= 1.5


@pytest.mark.parametrize("cls", [KLSOAP, REKLS])
def test_permuting_from_the_first_step_does_not(cls: Any) -> None:
    """This is the published cold start; it shows that the limit matters."""
    assert largest_rms(cls, (64, 16), 20, second_moment="permute", adam_warmup_steps=0) > 1.5


@pytest.mark.parametrize("cls", [SOAP, KLSOAP])
def test_what_the_clip_promises_it_keeps(cls: Any) -> None:
    options = {"second_moment": "permute", "precondition_frequency": 1, "max_update_rms": 0.7}
    assert 0.69 < largest_rms(cls, (64, 16), 20, **options) <= 0.7 * (1 + 1e-6)
