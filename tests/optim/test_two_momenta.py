"""The mixture of a fast and a slow momentum: special cases, and states with and without its entry.
(Its numbers are compared with a reference in `test_reference.py`.)"""

from typing import Any

import pytest
import torch
from optim_helpers import (
    Run,
    all_same,
    assert_same,
    clones,
    give_gradients,
    largest_difference,
    run_of,
)

from lather.optim import Muon, SOAPMuon
from lather.optim.batched import formats
from lather.optim.rules.muon import MuonRule

GAP = "momentum_gap"
START = 3
MIXED: dict[str, Any] = {"slow_momentum_start": START}
SHAPES = ((6, 4), (3, 4, 5), (5,))
FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)


@pytest.fixture(autouse=True)
def code_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in 8 bits is for matrices of any size here."""
    monkeypatch.setattr(formats, "MIN_CODED", 1)


def gaps(run: Run) -> list[bool]:
    """Return for each parameter whether its state has the entry of the mixture."""
    return [any(key.startswith(GAP) for key in run.state(i)) for i in range(len(run.params))]


@pytest.mark.parametrize("cls", [Muon, SOAPMuon])
def test_the_mixture_begins_after_the_step_that_is_named(cls: Any) -> None:
    a, b = run_of(cls, SHAPES, **MIXED), run_of(cls, SHAPES)
    a.steps(range(START))
    b.steps(range(START))
    assert all_same(a.params, b.params)
    assert not a.state(0)[GAP].any()
    a.steps([START])
    b.steps([START])
    assert largest_difference(a.params[:1], b.params[:1]) > 0
    assert a.state(0)[GAP].any()
    assert all_same(a.params[2:], b.params[2:])  # a vector


@pytest.mark.parametrize(
    "options", [{"slow_share": 0.0, "fast_momentum": 0.95}, {"slow_momentum": 0.85}], ids=str
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_mixture_of_one_momentum_is_that_momentum(
    options: dict[str, Any], nesterov: bool
) -> None:
    a = run_of(Muon, SHAPES, slow_momentum_start=1, nesterov=nesterov, **options)
    b = run_of(Muon, SHAPES, nesterov=nesterov)
    for step in range(6):
        if step == 1:
            b.groups[0]["momentum"] = options.get("fast_momentum", 0.85)
        a.steps([step])
        b.steps([step])
    assert largest_difference(a.params, b.params) < 1e-6


def test_the_published_mixture_has_a_mean_age_of_thirty_steps() -> None:
    rule = MuonRule(slow_momentum_start=1)
    fast, slow, share = rule.fast_momentum, rule.slow_momentum, rule.slow_share
    weights = [
        (1 - share) * (1 - fast) * fast**age + share * (1 - slow) * slow**age for age in range(2000)
    ]
    assert sum(weights) == pytest.approx(1)
    assert sum(age * weight for age, weight in enumerate(weights)) == pytest.approx(30, abs=0.01)


@FORMATS
def test_an_earlier_state_has_two_equal_momenta(dtype: torch.dtype) -> None:
    """A state without the entry is taken over by an optimizer with the option, as one in which the
    difference of the two momenta is zero; so is one whose option is set between two steps."""
    a, b = (run_of(Muon, SHAPES, state_dtype=dtype) for _ in range(2))
    for run in (a, b):
        run.steps(range(START + 2))
    saved = a.optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["slow_momentum_start"]  # as older versions have saved it
    loaded = run_of(Muon, SHAPES, state_dtype=dtype, **MIXED)
    loaded.optimizer.load_state_dict(saved)
    for p, q in zip(loaded.params, a.params, strict=True):
        p.data.copy_(q.data)
    assert gaps(loaded) == [True, False, False]
    b.groups[0].update(MIXED)
    b.optimizer.state_dict()
    for run in (loaded, b):
        run.steps(range(START + 2, START + 5))
    assert gaps(b) == [True, False, False]
    assert_same(loaded, b)


@FORMATS
def test_an_optimizer_without_the_option_drops_the_entry(dtype: torch.dtype) -> None:
    a = run_of(Muon, SHAPES, state_dtype=dtype, **MIXED)
    a.steps(range(START + 2))
    saved = a.optimizer.state_dict()
    saved["param_groups"][0]["slow_momentum_start"] = 0
    loaded, plain = (run_of(Muon, SHAPES, state_dtype=dtype) for _ in range(2))
    loaded.optimizer.load_state_dict(saved)
    for state in saved["state"].values():
        for key in [key for key in state if key.startswith(GAP)]:
            del state[key]
    plain.optimizer.load_state_dict(saved)
    a.groups[0]["slow_momentum_start"] = 0
    for run in (loaded, plain):
        for p, q in zip(run.params, a.params, strict=True):
            p.data.copy_(q.data)
    for run in (a, loaded, plain):
        run.steps(range(START + 2, START + 5))
        assert not any(gaps(run))
    assert_same(a, loaded)
    assert_same(a, plain)


def test_a_switch_that_is_moved_to_a_later_step_begins_with_equal_momenta_again() -> None:
    a = run_of(Muon, SHAPES, **MIXED)
    a.steps(range(START + 2))
    a.groups[0]["slow_momentum_start"] = START + 4
    a.steps(range(START + 2, START + 4))
    assert not a.state(0)[GAP].any()


def test_a_switch_that_is_moved_away_and_back_before_it_comes_begins_anew() -> None:
    a, b = (run_of(Muon, SHAPES, **MIXED) for _ in range(2))
    for steps, start, of_b in ((5, START, START), (3, 20, 0), (4, START, START)):
        a.groups[0]["slow_momentum_start"], b.groups[0]["slow_momentum_start"] = start, of_b
        first = int(a.state(0)["step"]) if a.optimizer.state else 0
        for run in (a, b):
            run.steps(range(first, first + steps))
        assert all_same(a.params, b.params)


def test_groups_mix_or_do_not_and_numbers_may_change_at_every_step() -> None:
    shape = (6, 4)
    mixed, plain = run_of(Muon, [shape], slow_momentum_start=1), run_of(Muon, [shape])
    both = run_of(Muon, [shape], slow_momentum_start=1)
    other = clones(both.params)
    both.optimizer.add_param_group({"params": other, "slow_momentum_start": 0})
    for step in range(5):
        for run in (mixed, plain, both):
            for group in run.groups:
                group["slow_momentum"] = 0.9 + 0.01 * step
            give_gradients(run.params, step)
        give_gradients(other, step)
        for run in (mixed, plain, both):
            run.optimizer.step()
    assert all_same(both.params, mixed.params)
    assert all_same(other, plain.params)
    assert largest_difference(mixed.params, plain.params) > 1e-3
