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
    Run,
    all_same,
    assert_same,
    clones,
    copy_gradients,
    every_kind,
    few_kinds,
    give_gradients,
    parameters,
    run,
    run_of,
)
from torch import Tensor

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon
from lather.optim.batched.step_counts import are_side_by_side

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


def step_both(a: Run, b: Run, step: int, missing: Callable[[], bool] = lambda: False) -> None:
    """Take a step of both with the same gradients, of which some may be `missing`; the second
    optimizer forgets its plan. Both must say the same if they refuse, and have the same weights."""
    b.optimizer._plan = b.optimizer._groups.roster = b.optimizer._store.roster = None
    give_gradients(a.params, step)
    for p in a.params:
        p.grad = None if missing() else p.grad
    copy_gradients(a.params, b.params)
    answers = []
    for one in (a, b):
        try:
            one.optimizer.step()
            answers.append("")
        except ValueError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]
    assert all_same(a.params, b.params)


@every_kind
def test_numbers_may_change_at_every_step_without_a_new_plan(kind: str, plans: list[int]) -> None:
    a, b = run_of(kind, SHAPES), run_of(kind, SHAPES)
    for step in range(6):
        for number, group in [*enumerate(a.groups), *enumerate(b.groups)]:
            names = NUMBERS.keys() & group.keys()
            assert {"lr", "weight_decay"} <= names
            group.update({name: NUMBERS[name](step + number) for name in names})
        step_both(a, b, step)
    assert plans.count(id(a.optimizer)) <= 2  # state is made in the first step
    assert plans.count(id(b.optimizer)) == 6
    assert_same(a, b)


@few_kinds
def test_coupled_decay_that_comes_and_goes(kind: str) -> None:
    a, b = (run_of(kind, SHAPES, weight_decay_method="l2") for _ in range(2))
    for step, decay in enumerate((0.0, 0.1, 0.0, 0.2, 0.3)):
        for group in a.groups + b.groups:
            group["weight_decay"] = decay
        step_both(a, b, step)


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (KLSOAP, "max_update_rms", (0.0, 0.1, 0.2, 0.0)),  # decides which rule vectors have
        (SOAP, "shampoo_beta", (-1, 0.9, -1.0, 0.5)),
        (SOAP, "lr", (torch.tensor(0.01), 0.02, torch.tensor(0.03), 0.03)),
        (SOAP, "keep_norm", (False, True, True, False)),
        (SOAP, "relative_update", (True, True, False, True)),
        (AdamW, "radial_brake", (0.0, 0.5, 0.4, 0.0)),
        (AdamW, "cautious_decay", (False, True, True, False)),
        (Muon, "row_floor", (0.9, 0.0, 0.8, 0.9)),
        (Muon, "scale", ("spectral", 0.3, 0.4, "match_rms_adamw")),
        (Muon, "steps", (5, 3, 5, 2)),
    ],
)
def test_changes_that_change_more_than_a_number(
    cls: type[MatrixOptimizer], name: str, values: tuple[Any, ...]
) -> None:
    a, b = run_of(cls, SHAPES), run_of(cls, SHAPES)
    for step, value in enumerate(values):
        a.groups[0][name] = b.groups[0][name] = value
        step_both(a, b, step)


@every_kind
def test_gradients_may_come_and_go(kind: str) -> None:
    a, b = run_of(kind, SHAPES), run_of(kind, SHAPES)
    choice = random.Random(0)
    for step in range(8):
        step_both(a, b, step, lambda: choice.random() < 0.4)
    assert_same(a, b)


def test_vectors_with_different_step_counts_are_few_calls_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters([(16,)] * 40)
    optimizer = AdamW(params)
    calls: list[int] = []
    original = AdamW.rule.step_whole

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
    assert [torch.equal(p, q) for p, q in zip((first, second), before, strict=True)] == [
        True,
        False,
    ]


def test_step_counts_side_by_side_are_known_from_others() -> None:
    """Counts of other places, orders, storages and dtypes are counted one by one."""
    counts = list(torch.arange(6.0).unbind())
    assert are_side_by_side(counts[1:4])
    for apart in (counts[::-1], counts[::2], [counts[0], counts[1].clone()], counts[:1] * 2, []):
        assert not are_side_by_side(apart)
    assert not are_side_by_side([counts[0], counts[1].view(torch.int32)])


def test_parameters_made_at_once_have_their_counts_side_by_side() -> None:
    params = parameters(SHAPES)
    optimizer = AdamW(params)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    counts = [optimizer.state[p]["step"] for p in params]
    assert are_side_by_side(counts)
    assert {float(x) for x in counts} == {3.0}
    params[2].grad = None  # the others are no longer side by side, and are counted all the same
    optimizer.step()
    assert [float(x) for x in counts] == [4.0, 4.0, 3.0, 4.0, 4.0, 4.0, 4.0]
