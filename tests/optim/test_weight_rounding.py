"""`weight_rounding` of bf16 parameters: a remainder makes them fp32 parameters, and stochastic
rounding is right on average."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    SHAPES,
    Run,
    all_same,
    assert_same,
    copy_gradients,
    few_kinds,
    give_gradients,
    make,
    parameter,
    parameters,
    run_of,
    through_a_file,
)
from torch import Tensor

from in_turn import in_turn
from lather.optim import SOAP, AdamW, Muon, state_bytes
from lather.optim.functional import exact_weight

BF16 = torch.bfloat16
DECAYS: tuple[dict[str, Any], ...] = (
    *({"weight_decay": 0.1, "weight_decay_method": m} for m in ("decoupled", "l2", "palm")),
    {"weight_decay": 0.01, "weight_decay_method": "independent"},
    {"keep_norm": True},
    {"weight_decay": 0.1, "cautious_decay": True, "radial_brake": 0.5},
    {"batched": False, "bucket_bytes": 1},
)


def bf16_run(kind: Any, **options: Any) -> Run:
    """Make an optimizer of bf16 parameters whose gradients are fp32."""
    run = run_of(kind, SHAPES, BF16, **options)
    for p in run.params:
        p.grad_dtype = torch.float32
    return run


def fp32_twin(run: Run, kind: str, **options: Any) -> Run:
    """Make the same optimizer of fp32 parameters with the same values."""
    params = [torch.nn.Parameter(p.detach().float()) for p in run.params]
    return Run(make(kind, params, **options), params)


def exact(run: Run) -> list[Tensor]:
    return [exact_weight(p, run.optimizer.state[p]) for p in run.params]


def step_both(wide: Run, narrow: Run, steps: range) -> None:
    for step in steps:
        give_gradients(wide.params, step)
        copy_fp32(wide, narrow)
        wide.optimizer.step()
        narrow.optimizer.step()


def copy_fp32(source: Run, target: Run) -> None:
    for p, q in zip(source.params, target.params, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()


@pytest.mark.parametrize(
    ("kind", "options"),
    in_turn([*FEW_KINDS, "adamw"], DECAYS, each=3),
    ids=lambda x: next(iter(reversed(x.values()))) if isinstance(x, dict) else x,
)
def test_weights_with_remainders_are_fp32_weights(kind: str, options: dict[str, Any]) -> None:
    narrow = bf16_run(kind, **options, weight_rounding="remainder")
    wide = fp32_twin(narrow, kind, **options)
    step_both(wide, narrow, range(4))
    assert all_same(exact(narrow), wide.params)
    assert all_same(narrow.params, [p.bfloat16() for p in wide.params])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "remainder"])
def test_steps_too_small_for_bf16(rounding: str) -> None:
    """Weights between 1 and 2 move by about 4e-4 per step, a twentieth of the distance of
    neighbors, as those of torch's AdamW in fp32. 40 steps of stochastic rounding have a standard
    deviation of 1.1e-2, the mean of 262,144 weights 2.1e-5, which is 0.13 % of the way.

    At first the rate is 0, for Adam's first updates are all 1: equal values are rounded alike."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.rand(512, 512, generator=generator).add(1).to(BF16))
    q = torch.nn.Parameter(p.detach().float())
    p.grad_dtype, start = torch.float32, p.detach().double()
    optimizer = AdamW([p], lr=0.0, weight_decay=0.0, weight_rounding=rounding)
    fp32 = torch.optim.AdamW([q], lr=0.0, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(60):
        p.grad = torch.rand(512, 512, generator=generator) + 0.5
        q.grad = p.grad.clone()
        for one in (optimizer, fp32):
            one.param_groups[0]["lr"] = 4e-4 if step >= 20 else 0.0
            one.step()
    way, expected = (float((start - x.detach().double()).mean()) for x in (p, q))
    if rounding == "nearest":
        assert way == 0
    elif rounding == "stochastic":
        assert math.isclose(way, expected, rel_tol=0.006)
        assert not math.isclose(0.99 * way, expected, rel_tol=0.006)
    else:
        w = exact_weight(p, optimizer.state[p])
        assert torch.allclose(w, q, rtol=0, atol=1e-2 * expected)


def test_other_dtypes_are_not_rounded() -> None:
    for dtype in (torch.float32, torch.float64):
        run, other = (
            run_of("soap", SHAPES, dtype, weight_rounding=x) for x in ("nearest", "remainder")
        )
        run.steps(range(3))
        other.steps(range(3))
        assert_same(run, other)


def test_a_group_of_both_dtypes() -> None:
    p, q = parameter(6, 4, dtype=BF16), parameter(6, 4)
    optimizer = SOAP([p, q], lr=1e-2, weight_rounding="remainder")
    for step in range(3):
        optimizer.param_groups[0]["lr"] *= 0.9
        give_gradients([p, q], step)
        optimizer.step()
    assert optimizer.state[p].keys() - optimizer.state[q].keys() == {"remainder"}


@few_kinds
@pytest.mark.parametrize("rounding", ["stochastic", "remainder"])
def test_a_resumed_run_has_the_same_bits(kind: str, rounding: str) -> None:
    a = bf16_run(kind, weight_rounding=rounding)
    a.steps(range(3))
    b = bf16_run(kind, weight_rounding=rounding)
    for p, q in zip(a.params, b.params, strict=True):
        q.data.copy_(p)
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    for run in (a, b):
        run.steps(range(3, 6))
    assert_same(a, b)


def test_rounding_changes_from_step_to_step() -> None:
    """The option may change: remainders begin at zero, and go."""
    p = parameter(6, 4, dtype=BF16)
    optimizer = Muon([p], lr=1e-2)
    for step, rounding in enumerate(("nearest", "remainder", "remainder", "stochastic")):
        optimizer.param_groups[0]["weight_rounding"] = rounding
        give_gradients([p], step)
        optimizer.step()
        assert ("remainder" in optimizer.state[p]) == (rounding == "remainder")
    assert optimizer.state[p]["step"] == 4


def test_a_saved_state_without_remainders_begins_with_none() -> None:
    """A state of torch's AdamW, for example."""
    (p, q) = (parameter(6, 4, dtype=BF16) for _ in range(2))
    old = torch.optim.AdamW([p], lr=1e-2)
    give_gradients([p], 0)
    old.step()
    state = copy.deepcopy(old.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        state["state"][0][name] = state["state"][0][name].float()
    optimizer = AdamW([q], lr=1e-2, weight_rounding="remainder")
    optimizer.load_state_dict(state)
    assert not optimizer.state[q]["remainder"].any()
    copy_gradients([p], [q])
    optimizer.step()
    assert optimizer.state[q]["remainder"].any()


def test_a_remainder_of_another_shape_is_refused_before_anything_changes() -> None:
    run = run_of("muon", [(6, 4)], BF16, weight_rounding="remainder")
    run.steps(range(1))
    before = run.params[0].detach().clone()
    run.state(0)["remainder"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"remainder \(3,\) of torch.uint8, expected \(6, 4, 2\)"):
        run.steps(range(1, 2))
    assert torch.equal(run.params[0], before)


def test_bytes_of_state() -> None:
    """2 bytes for every weight in bf16."""
    options: dict[str, Any] = {"dtype": BF16, "weight_rounding": "remainder"}
    assert state_bytes((6, 4), Muon, **options) - state_bytes((6, 4), Muon, dtype=BF16) == 48
    assert state_bytes((6, 4), Muon, weight_rounding="remainder") == state_bytes((6, 4), Muon)
    run = run_of("soap", [(6, 4)], BF16, weight_rounding="remainder")
    run.steps(range(1))
    kept = sum(x.numel() * x.element_size() for x in run.state(0).values())
    assert kept == state_bytes((6, 4), SOAP, **options)


def test_weights_that_a_user_sets_to_zero_stay_finite() -> None:
    params = parameters([(16, 16)], BF16)
    optimizer = AdamW(params, lr=1e-3, weight_rounding="remainder")
    for step in range(4):
        give_gradients(params, step)
        optimizer.step()
        params[0].data[:, ::2] = 0
    assert params[0].isfinite().all()
