"""The first preconditioned updates do not blow up: rms(U) on independent Gaussian gradients, the
hardest case for a cold start."""

from typing import Any

import pytest
import torch
from optim_helpers import give_gradients

from lather.optim import KLSOAP, REKLS, SOAP, Muon, SOAPMuon, StackedSOAP

LIMIT = 1.5
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (KLSOAP, {}),
        (KLSOAP, {"first_bases": "iteration", "refresh_method": "root_qr"}),
        (KLSOAP, {"precondition_frequency": 10, "stagger_refresh": True, "stagger_first": True}),
        (REKLS, {}),
        (SOAP, {"second_moment": "rotate", "precondition_frequency": 1}),
        (
            SOAP,
            {"second_moment": "rotate", "precondition_frequency": 1, "first_bases": "iteration"},
        ),
        (SOAP, {"second_moment": "rotate", "stagger_refresh": True, "stagger_first": True}),
    ],
    ids=[
        "KLSOAP",
        "KLSOAP_by_iteration",
        "KLSOAP_one_by_one",
        "REKLS",
        "SOAP",
        "SOAP_by_iteration",
        "SOAP_one_by_one",
    ],
)
def test_the_first_fifty_updates_stay_bounded(
    cls: Any, options: dict[str, Any], shape: tuple[int, int]
) -> None:
    steps = 50
    assert 0.5 < largest_rms(cls, shape, steps, **options) <= LIMIT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Muon, {}),
        (Muon, {"normalize": "row"}),
        (SOAPMuon, {}),
        (SOAPMuon, {"sides": "both"}),
        (SOAP, {"orthogonalize": True}),
    ],
    ids=str,
)
def test_orthogonalised_updates_are_of_the_size_of_adamws(
    cls: Any, options: dict[str, Any], shape: tuple[int, int]
) -> None:
    """The size is 0.2, times the 0.7 to 1.2 that five steps of Newton-Schulz leave of singular
    values."""
    assert 0.14 < largest_rms(cls, shape, 12, **options) < 0.24


@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_the_first_fifty_updates_of_stacked_experts_stay_bounded(shape: tuple[int, ...]) -> None:
    assert 0.5 < largest_rms(StackedSOAP, shape, 50) <= LIMIT


@pytest.mark.parametrize("cls", [KLSOAP, REKLS], ids=["KLSOAP", "REKLS"])
def test_permuting_from_the_first_step_does_not(cls: Any) -> None:
    """This is the published cold start; it shows that the limit matters."""
    assert largest_rms(cls, (64, 16), 20, second_moment="permute", adam_warmup_steps=0) > LIMIT


@pytest.mark.parametrize("first_bases", ["eigh", "iteration"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_start_from_rotated_bases_stays_within_one(
    shape: tuple[int, int], first_bases: str
) -> None:
    """The test covers the rules whose updates have no fixed size anyway."""
    for cls in (SOAP, KLSOAP):
        options = {
            "second_moment": "rotate",
            "precondition_frequency": 1,
            "first_bases": first_bases,
        }
        assert largest_rms(cls, shape, 20, **options) <= 1.01


def test_what_the_clip_promises_it_keeps() -> None:
    for cls in (SOAP, KLSOAP):
        largest = largest_rms(
            cls, (64, 16), 20, second_moment="permute", precondition_frequency=1, max_update_rms=0.7
        )
        assert 0.69 < largest <= 0.7 * (1 + 1e-6)
