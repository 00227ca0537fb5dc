"""Time, temporary memory and state, on cases whose answer is known."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.contestants import SETS, Contestant, OptimizerCase, gradient_pool
from benchmarks.measure import peak_temporary_bytes, state_bytes, time_rounds

CPU = torch.device("cpu")
SIZE = 4 * 1000 * 1000
SCALARS = 64
"""Bytes that torch allocates for the numbers in an expression."""


@pytest.fixture
def a() -> Tensor:
    return torch.ones(1000, 1000)


def test_peak_counts_what_is_alive_at_one_time(a: Tensor) -> None:
    def run() -> None:
        for _ in range(3):
            b = a + a
            c = b * 2  # b and c are alive
            del b
            c.add_(c)  # works in place
            del c

    assert 2 * SIZE <= peak_temporary_bytes(run, CPU) <= 2 * SIZE + SCALARS


def test_peak_sees_foreach_and_the_inside_of_operations(a: Tensor) -> None:
    assert (
        3 * SIZE
        <= peak_temporary_bytes(lambda: torch._foreach_mul([a, a, a], 2.0), CPU)
        <= 3 * SIZE + SCALARS
    )
    inside = peak_temporary_bytes(lambda: torch.linalg.qr(a[:100, :100]), CPU)
    assert inside > 2 * 4 * 100 * 100  # Q, R and the workspace


def test_profiler_leaves_standard_error_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    peak_temporary_bytes(lambda: None, CPU)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_state_counts_each_storage_once_and_no_parameter() -> None:
    p, g, batch = torch.zeros(10), torch.zeros(10), torch.zeros(4, 5)
    hidden = SimpleNamespace(cache=(torch.zeros(7), {"again": batch}))
    optimizer: Any = torch.optim.SGD([p])
    optimizer.state[p] = {"views": [batch[0], batch[1:]], "step": torch.zeros(())}
    optimizer.other, optimizer.loop = hidden, optimizer
    assert state_bytes(Contestant("fake", [p], optimizer, [[g]])) == 4 * (20 + 1 + 7)


@pytest.mark.parametrize("name", ["tiny", "tiny_3d"])
@pytest.mark.parametrize("rule", ["soap", "muon", "adamw"])
def test_state_of_ours_is_within_the_bound(rule: str, name: str) -> None:
    case = OptimizerCase(rule, SETS[name], 2)
    contestant = case.contestant("lather", gradient_pool(case.matrices, CPU))
    measure.run_steps(contestant, 4)
    m, n = case.matrices.shape
    bases = m * m + n * n
    factors = (bases + m + n) // 2  # a triangle of each
    floats = {"soap": 2 * m * n + factors + bases, "muon": m * n, "adamw": 2 * m * n}[rule]
    assert (
        4 * case.matrices.num_matrices * floats
        <= state_bytes(contestant)
        <= case.state_bound_bytes()
    )


def test_rounds_hold_whole_intervals_of_every_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [OptimizerCase("soap", SETS["tiny"], f).steps_per_round for f in (1, 2, 3, 10)] == [
        2,
        2,
        3,
        10,
    ]
    calls: list[tuple[str, int]] = []

    def fake(contestant: Contestant, num_steps: int, _: torch.device) -> float:
        calls.append((contestant.name, num_steps))
        return float(len(calls))

    monkeypatch.setattr(measure, "time_steps", fake)
    contestants = [Contestant(name, [], torch.optim.SGD([torch.zeros(1)]), []) for name in "abc"]
    times = time_rounds(contestants, 10, 2, CPU)
    assert calls == [(name, 10) for name in "abcbca"]
    assert times == {"a": [1.0, 6.0], "b": [2.0, 4.0], "c": [3.0, 5.0]}
