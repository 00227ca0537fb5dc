"""Ready-made intervals between refreshes: their numbers, their limits, and how often they
refresh."""

import copy
import pickle
from typing import Any

import pytest
from optim_helpers import FEW_SOAP_KINDS, run_of

from lather.optim.schedules import CosineFrequency, LinearFrequency, StepFrequency

by_class = pytest.mark.parametrize("cls", [LinearFrequency, CosineFrequency, StepFrequency])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LinearFrequency(1, 5, 4, start_step=2), [1, 1, 1, 2, 3, 4, 5, 5, 5]),
        (CosineFrequency(1, 11, 4, start_step=2), [1, 1, 1, 2, 6, 10, 11, 11, 11]),
        (StepFrequency(1, 10, 2, start_step=2), [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 10, 10]),
        (StepFrequency(3, 7, 1), [3, 6, 7, 7]),
        (LinearFrequency(4, 4, 1), [4, 4, 4]),
    ],
    ids=["linear", "cosine", "step", "step_from_three", "constant"],
)
def test_in_numbers(schedule: Any, expected: list[int]) -> None:
    assert [schedule(t) for t in range(len(expected))] == expected


@by_class
def test_from_the_least_to_the_most_without_a_step_back(cls: Any) -> None:
    schedule = cls(2, 50, 40, start_step=10)
    values = [schedule(t) for t in range(1, 1000)]
    assert all(isinstance(value, int) for value in values)
    assert values == sorted(values)
    assert (set(values[:10]), values[-1], schedule(10**12)) == ({2}, 50, 50)


@by_class
def test_equal_pickled_and_shown(cls: Any) -> None:
    one = cls(1, 8, 5)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one != cls(1, 8, 6)
    assert hash(one) == hash(cls(1, 8, 5))
    assert repr(one).startswith(f"{cls.__name__}(min_frequency=1")


def doubling(t: int) -> int:
    return 1 if t < 4 else 4


@pytest.mark.parametrize(
    "frequency",
    [1, 3, doubling, LinearFrequency(1, 4, 8), CosineFrequency(1, 4, 8), StepFrequency(1, 4, 4)],
    ids=["one", "three", "function", "linear", "cosine", "step"],
)
@pytest.mark.parametrize(
    "kind", [*FEW_SOAP_KINDS, "soap_muon_per_expert", "shampoo_per_expert", "shampoo"]
)
def test_bases_are_refreshed_at_the_steps_that_the_interval_says(kind: str, frequency: Any) -> None:
    a = run_of(kind, [(4, 4) if kind == "shampoo" else (3, 4, 4)], precondition_frequency=frequency)
    # KL rules refresh first in the step after the warm-up
    first = 1 if kind.startswith(("soap", "shampoo")) else 2
    per_refresh = 2 * 3 if "per_expert" in kind else 2 if kind in ("stacked_soap", "shampoo") else 3
    expected, refreshed = [], []
    for t in range(1, 13):
        before = a.optimizer.counters["refreshes_done"]
        a.steps([t])
        refreshed.append(a.optimizer.counters["refreshes_done"] - before)
        interval = frequency(t) if callable(frequency) else frequency
        expected.append(per_refresh * (t == first or (t > first and t % interval == 0)))
    assert refreshed == expected


def test_every_step_of_the_warm_up_refreshes() -> None:
    warmup = {"precondition_warmup_steps": 4, "adam_warmup_steps": 2}
    a, done = run_of("soap", [(4, 4)], precondition_frequency=5, **warmup), []
    for t in range(1, 11):
        a.steps([t])
        done.append(a.optimizer.counters["refreshes_done"] // 2)
    assert done == [0, 1, 2, 3, 4, 4, 4, 4, 4, 5]
