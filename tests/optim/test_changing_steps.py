"""Steps that differ from the one before: rates, decays and other numbers that schedulers change,
and sets of gradients. Results are those of an optimizer that plans every step anew, without the
price of new plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    KINDS,
    all_same,
    clones,
    copy_gradients,
    give_gradients,
    make,
    parameters,
    run,
    same_state,
    snapshot,
)
from torch import Tensor

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon

SHAPES = [(4, 6), (3, 4, 5), (4, 6), (5,), (7,), (4, 6), (3, 4, 5)]

NUMBERS: dict[str, Callable[[int], Any]] = {
    "lr": lambda step: 1e-2 / (1 + step),
    "weight_decay": lambda step: 0.1 * step,
    "betas": lambda step: (0.9 - 0.01 * step, 0.95),
    "momentum": lambda step: 0.95 - 0.02 * step,
    "beta2": lambda step: 0.9 + 0.01 * step,
    "shampoo_beta": lambda step: 0.9 + 0.01 * step,
    "eps": lambda step: 1e-8 * (1 + step),
    "max_update_rms": lambda step: 1.0 - 0.1 * step,
}
"""Options that are numbers, each with its value in a step."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each optimizer that makes a plan is added, by its id."""
    made: list[int] = []
    original = MatrixOptimizer._make_plan

    def counted(self: MatrixOptimizer, *rest: Any) -> Any:
        made.append(id(self))
        return original(self, *rest)

    monkeypatch.setattr(MatrixOptimizer, "_make_plan", counted)
    return made


def forget_plan(optimizer: MatrixOptimizer) -> None:
    optimizer._plan = optimizer._groups.roster = None


def change(optimizer: MatrixOptimizer, step: int) -> list[str]:
    """Change all numbers that the groups have, and name them."""
    changed = []
    for number, group in enumerate(optimizer.param_groups):
        for name in NUMBERS.keys() & group.keys():
            group[name] = NUMBERS[name](step + number)
            changed.append(name)
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_may_change_at_every_step_without_a_new_plan(kind: str, plans: list[int]) -> None:
    params = parameters(SHAPES)
    others = clones(params)
    a, b = make(kind, params), make(kind, others)
    for step in range(6):
        for optimizer in (a, b):
            assert {"lr", "weight_decay"} <= {*change(optimizer, step), "weight_decay"}
        forget_plan(b)
        give_gradients(params, step)
        copy_gradients(params, others)
        a.step()
        b.step()
    assert plans.count(id(a)) <= 2  # the first and the second step: state is made in the first one
    assert plans.count(id(b)) == 6
    assert all_same(params, others)
    assert same_state(a, params, b, others)


def test_a_weight_decay_that_changes_has_the_value_of_arithmetic() -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = AdamW([p], lr=0.5)
    expected = 1.0
    for decay in (0.1, 0.0, 0.2, 0.3):
        optimizer.param_groups[0]["weight_decay"] = decay
        p.grad = torch.zeros(2, 2)
        optimizer.step()
        expected *= 1 - 0.5 * decay
        torch.testing.assert_close(p.detach(), torch.full((2, 2), expected))


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_coupled_decay_that_comes_and_goes(kind: str) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params), make(kind, others)
    for optimizer in (a, b):
        for group in optimizer.param_groups:
            group["weight_decay_method"] = "l2"
    for step, decay in enumerate((0.1, 0.0, 0.2, 0.3, 0.0)):
        for optimizer in (a, b):
            for group in optimizer.param_groups:
                group["weight_decay"] = decay
        forget_plan(b)
        give_gradients(params, step)
        copy_gradients(params, others)
        a.step()
        b.step()
        assert all_same(params, others)


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (KLSOAP, "max_update_rms", (0.0, 0.1, 0.2, 0.0)),  # decides which rule vectors have
        (SOAP, "shampoo_beta", (-1, 0.9, -1.0, 0.5)),
        (SOAP, "lr", (torch.tensor(0.01), 0.02, torch.tensor(0.03), 0.03)),
        (SOAP, "keep_norm", (False, True, True, False)),
        (Muon, "scale", ("spectral", 0.3, 0.4, "match_rms_adamw")),
        (Muon, "steps", (5, 3, 5, 2)),
    ],
)
def test_changes_that_change_more_than_a_number(
    cls: type[MatrixOptimizer], name: str, values: tuple[Any, ...]
) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = cls(params, lr=0.01), cls(others, lr=0.01)
    for step, value in enumerate(values):
        for optimizer in (a, b):
            optimizer.param_groups[0][name] = value
        forget_plan(b)
        give_gradients(params, step)
        copy_gradients(params, others)
        outcomes = []
        for optimizer in (a, b):
            try:
                optimizer.step()
                outcomes.append("")
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert all_same(params, others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("eps", float("nan")),
        ("lr", float("inf")),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_changes(name: str, value: Any) -> None:
    params = parameters(SHAPES)
    optimizer = SOAP(params)
    run(optimizer, params, range(3))
    before = snapshot(optimizer, params)
    good = optimizer.param_groups[0][name]
    for _ in range(2):
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name}="):
            run(optimizer, params, range(3, 4))
        assert all(map(torch.equal, before, snapshot(optimizer, params)))
    optimizer.param_groups[0][name] = good
    run(optimizer, params, range(3, 4))


def test_groups_share_batches_exactly_while_their_numbers_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters([(4, 6)] * 4)
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:]}])
    sizes: list[int] = []
    original = Muon.rule.update
    monkeypatch.setattr(
        Muon.rule,
        "update",
        lambda self, g, *rest: (sizes.append(len(g)), original(self, g, *rest))[1],
    )
    for step, (first, second) in enumerate(
        [(0.1, 0.1), (0.1, 0.1), (0.1, 0.2), (0.3, 0.4), (0.5, 0.5), (0.6, 0.6)]
    ):
        optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[1]["weight_decay"] = (
            first,
            second,
        )
        run(optimizer, params, range(step, step + 1))
    assert sizes == [4, 4, 2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_may_come_and_go(kind: str) -> None:
    params = parameters(SHAPES)
    others = clones(params)
    a, b = make(kind, params), make(kind, others)
    choice = random.Random(0)
    for step in range(8):
        give_gradients(params, step)
        for p in params:
            if choice.random() < 0.4:
                p.grad = None
        copy_gradients(params, others)
        forget_plan(b)
        b._store.roster = None
        a.step()
        b.step()
        assert all_same(params, others)
    assert same_state(a, params, b, others)


def test_vectors_with_different_step_counts_are_few_calls_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [torch.nn.Parameter(torch.zeros(16)) for _ in range(40)]
    optimizer = AdamW(params)
    calls: list[int] = []
    original = AdamW.rule.step_whole  # type: ignore[attr-defined]

    def counted(self: Any, weights: list[Tensor], *rest: Any) -> bool:
        calls.append(len(weights))
        return original(self, weights, *rest)

    monkeypatch.setattr(AdamW.rule, "step_whole", counted)
    for step in range(2):
        for number, p in enumerate(params):
            p.grad = torch.ones(16) if step or number % 2 else None
        optimizer.step()
    assert calls == [20, 20, 20]


@pytest.mark.parametrize(
    ("name", "bad"), [("lr", -1.0), ("lr", float("nan")), ("weight_decay", -1.0), ("betas", 3)]
)
def test_a_refused_change_of_one_group_leaves_the_others_as_they_are(name: str, bad: Any) -> None:
    first, second = parameters([(16,), (16,)])
    optimizer = AdamW([{"params": [first]}, {"params": [second]}], lr=0.1)
    run(optimizer, [first, second], range(1))
    good = optimizer.param_groups[1][name]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[1][name] = bad
    with pytest.raises(ValueError, match=name):
        run(optimizer, [first, second], range(1, 2))
    optimizer.param_groups[1][name] = good
    before = clones([first, second])
    run(optimizer, [first, second], range(1, 2))
    assert torch.equal(first.detach(), before[0].detach())
    assert not torch.equal(second.detach(), before[1].detach())


def test_a_key_that_takes_the_place_of_another_is_seen() -> None:
    (p,) = parameters([(4, 6)])
    optimizer = Muon([{"params": [p], "lr_scale": 1.0}])
    run(optimizer, [p], range(1))
    del optimizer.param_groups[0]["lr_scale"]
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ValueError, match="use_muon"):
        run(optimizer, [p], range(1, 2))
