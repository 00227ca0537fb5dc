"""A step that is given the measurements of its gradients (`measure_gradients`): the same numbers,
and it does not measure again."""

from typing import Any

import pytest
import torch
from optim_helpers import Run, all_same, clones, give_gradients, parameters, run_of
from torch import nn

from lather.optim import KLSOAP, SOAP, AdamW, Muon, SOAPMuon
from lather.optim.batched import gradients

SHAPES = [(6, 4), (3, 5, 4), (4, 6)]
OPTIONS: dict[str, Any] = {"lr": 0.1, "nonfinite": "ignore", "matrix_layout": "per_expert"}


def with_gradients(a: Run, step: int = 0) -> Run:
    """Draw gradients; in the first two steps one expert gets no token."""
    give_gradients(a.params, step)
    if step < 2:
        a.params[1].grad[1].zero_()
    return a


@pytest.mark.parametrize("cls", [SOAP, KLSOAP, Muon, SOAPMuon, AdamW])
def test_a_step_with_known_norms_has_the_same_bits_and_does_not_look(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for _ in range(2):
        params = parameters(SHAPES)
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        runs.append(Run(cls(groups, **OPTIONS), params))
    a, b = runs
    for step in range(4):
        with_gradients(a, step)
        with_gradients(b, step)
        norms = a.optimizer.measure_gradients()
        checked = norms.on_host(norms.values.clone())
        for group in a.groups + b.groups:
            group["lr"] = 0.1 / (step + 1)
        b.optimizer.step()
        with monkeypatch.context() as patched:
            patched.setattr(gradients, "_measure", None)
            a.optimizer.step(norms=checked)
        assert all_same(a.params, b.params)


def test_norms_of_experts_are_measured_one_by_one_and_no_others() -> None:
    a = with_gradients(run_of(SOAP, SHAPES, **OPTIONS))
    norms = a.optimizer.measure_gradients()
    ((param, measured),) = norms.of_parameter.items()
    assert param is a.params[1]
    torch.testing.assert_close(measured, torch.linalg.vector_norm(param.grad, dim=(1, 2)))
    assert norms.values.tolist() == measured.tolist()


def test_a_group_that_decides_about_nonfinite_gradients_looks_by_itself() -> None:
    a = with_gradients(run_of(SOAP, SHAPES, **{**OPTIONS, "nonfinite": "skip"}))
    a.params[1].grad[1, 0, 0] = torch.nan
    norms = a.optimizer.measure_gradients()
    assert not norms.of_parameter
    assert not norms.values.numel()
    a.optimizer.step(norms=norms.on_host(norms.values))
    assert a.optimizer.counters["nonfinite_skipped"] == 1


def test_other_parameters_are_looked_at_again() -> None:
    """Norms that were measured before a group was added belong to other parameters."""
    a, added = with_gradients(run_of(SOAP, SHAPES, **OPTIONS)), nn.Parameter(torch.ones(3, 2))
    norms = a.optimizer.measure_gradients()
    checked = norms.on_host(norms.values)
    a.optimizer.add_param_group({"params": [added]})
    added.grad, before = torch.ones(3, 2), clones([added])
    a.optimizer.step(norms=checked)
    assert not all_same([added], before)
