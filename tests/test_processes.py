"""The number of cores that a process may use, on systems that tell it and on others."""

from __future__ import annotations

import os

import pytest

from lather.processes import num_cores


def test_cores_that_a_process_is_bound_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7} if process == 0 else set(), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert num_cores() == 3


@pytest.mark.parametrize(("told", "expected"), [(12, 12), (None, 1)])
def test_all_cores_count_where_nothing_binds_processes(told: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: told)
    assert num_cores() == expected
