"""Rounding is no direction of descent: where gradients have no part, weights do not move, in fp32
as in fp64. Divided by its own second moment, rounding would be as large as anything else."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.optim import KLSOAP, REKLS, SOAP, Muon, Shampoo, SOAPMuon, StackedSOAP

SHORT = (0.9, 0.5)
"""Decay rates with which a second moment forgets within some steps."""
RULES: dict[str, Any] = {
    "soap": partial(SOAP, betas=SHORT),
    "soap, orthogonalized": partial(SOAP, betas=SHORT, orthogonalize=True),
    "soap, momentum in the weights' coordinates": partial(
        SOAP, betas=SHORT, second_moment="rotate", statistics_of="momentum"
    ),
    "kl-soap": KLSOAP,
    "rekls": REKLS,
    "stacked soap": StackedSOAP,
    "soap-muon": SOAPMuon,
    "soap-muon, both sides": partial(SOAPMuon, sides="both"),
    "soap-muon, every step": partial(SOAPMuon, precondition_frequency=1),
    "soap-muon, factors of gradients": partial(SOAPMuon, statistics_of="gradient"),
    "muon": Muon,
    "shampoo": Shampoo,
}


def movement(make: Any, gradients: list[Tensor], first: int = 0) -> Tensor:
    """Return how far zeros move from step `first` on."""
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = make([weight], lr=0.01, weight_decay=0.0)
    start = weight.detach().clone()
    for step, gradient in enumerate(gradients):
        if step == first:
            start = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach() - start


@pytest.mark.parametrize("shape", [(16, 24), (3, 12, 20)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_rows_and_columns_without_gradients_stay(rule: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator) for _ in range(60)]
    for gradient in gradients:
        gradient[..., 3, :] = 0
        gradient[..., 5] = 0
    layout = {"matrix_layout": "per_expert"} if len(shape) == 3 and "stacked" not in rule else {}
    moved = movement(partial(RULES[rule], **layout), gradients, 50)
    for still in (moved[..., 3, :], moved[..., 5]):
        assert still.norm() < 1e-5 * moved.norm()


@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 2.0**50])
@pytest.mark.parametrize("sides", ["smaller", "both"])
def test_soap_muon_stays_in_the_span_of_its_gradients(sides: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    span = torch.randn(32, 4, generator=generator)
    factors = [torch.randn(4, 48, generator=generator) for _ in range(30)]
    moved = movement(partial(SOAPMuon, sides=sides), [scale * span @ each for each in factors])
    q, _ = torch.linalg.qr(span)
    assert (moved - q @ (q.T @ moved)).norm() < 1e-4 * moved.norm()


@pytest.mark.parametrize("rule", ["soap", "kl-soap", "soap-muon"])
def test_a_direction_of_a_ten_thousandth_is_no_rounding(rule: str) -> None:
    """Rules that divide by the second moment bring small directions to the size of the others."""
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(16, 24, generator=generator) for _ in range(60)]
    for gradient in gradients:
        gradient[3] *= 1e-4
    moved = movement(RULES[rule], gradients, 50)
    assert moved[3].norm() > 0.1 * moved.norm() / 4
