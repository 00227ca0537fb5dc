"""The number of cores that a process may use, on systems that tell it and on others."""

from __future__ import annotations

import os

import pytest

from lather.processes import num_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process is bound to cores on Linux alone")
def test_cores_that_a_process_is_bound_to_count() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)


@pytest.mark.parametrize(("told", "expected"), [(12, 12), (None, 1)])
def test_all_cores_count_where_nothing_binds_processes(told: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: told)
    assert num_cores() == expected
