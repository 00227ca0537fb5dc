"""A step that is given the measurements of its gradients (`measure_gradients`): the same numbers,
and it does not measure again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.optim import KLSOAP, SOAP, AdamW, Muon, SOAPMuon
from lather.optim.batched import gradients

RULES = [SOAP, KLSOAP, Muon, SOAPMuon, AdamW]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((6, 4), (3, 5, 4), (4, 6))
    ]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    """Draw gradients; in the first two steps one expert gets no token."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    assert params[1].grad is not None
    if step < 2:
        params[1].grad[1].zero_()


@pytest.mark.parametrize("cls", RULES, ids=lambda cls: cls.__name__)
def test_a_step_with_known_norms_has_the_same_bits_and_does_not_look(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, plain = parameters(), parameters()
    optimizers = [
        cls(
            [{"params": some[:1]}, {"params": some[1:]}],
            lr=0.1,
            nonfinite="ignore",
            matrix_layout="per_expert",
        )
        for some in (told, plain)
    ]
    for step in range(4):
        give_gradients(told, step)
        give_gradients(plain, step)
        norms = optimizers[0].measure_gradients()
        checked = norms.on_host(norms.values.clone())
        for group in optimizers[0].param_groups + optimizers[1].param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizers[1].step()
        with monkeypatch.context() as patched:
            patched.setattr(gradients, "_measure", None)
            optimizers[0].step(norms=checked)
        assert all(one.equal(other) for one, other in zip(told, plain, strict=True))


def test_norms_of_experts_are_measured_one_by_one_and_no_others() -> None:
    params = parameters()
    optimizer = SOAP(params, lr=0.1, nonfinite="ignore", matrix_layout="per_expert")
    give_gradients(params, 0)
    norms = optimizer.measure_gradients()
    assert params[1].grad is not None
    (measured,) = norms.of_parameter.items()
    assert measured[0] is params[1]
    torch.testing.assert_close(measured[1], torch.linalg.vector_norm(params[1].grad, dim=(1, 2)))
    assert norms.values.tolist() == measured[1].tolist()


def test_a_group_that_decides_about_nonfinite_gradients_looks_by_itself() -> None:
    params = parameters()
    optimizer = SOAP(params, lr=0.1, nonfinite="skip", matrix_layout="per_expert")
    give_gradients(params, 0)
    assert params[1].grad is not None
    params[1].grad[1, 0, 0] = torch.nan
    norms = optimizer.measure_gradients()
    assert not norms.of_parameter
    assert not norms.values.numel()
    optimizer.step(norms=norms.on_host(norms.values))
    assert optimizer.counters["nonfinite_skipped"] == 1


def test_other_parameters_are_looked_at_again() -> None:
    """Norms that were measured before a group was added belong to other parameters."""
    params, added = parameters(), nn.Parameter(torch.ones(3, 2))
    optimizer = SOAP(params, lr=0.1, nonfinite="ignore", matrix_layout="per_expert")
    give_gradients(params, 0)
    measured = optimizer.measure_gradients()
    norms = measured.on_host(measured.values)
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(3, 2)
    optimizer.step(norms=norms)
    assert not added.equal(torch.ones(3, 2))


def test_a_closure_makes_other_gradients() -> None:
    params = parameters()
    optimizer = SOAP(params, lr=0.1, nonfinite="ignore", matrix_layout="per_expert")
    give_gradients(params, 0)
    norms = optimizer.measure_gradients()
    before = [p.clone() for p in params]

    def closure() -> Tensor:
        raise AssertionError("must not be called")

    with pytest.raises(ValueError, match="give one of the two"):
        optimizer.step(closure, norms=norms.on_host(norms.values))
    assert all(p.equal(old) for p, old in zip(params, before, strict=True))
