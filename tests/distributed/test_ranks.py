"""The helper that starts ranks: results by rank, errors with the rank's traceback, nothing left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def total(rank: int, world_size: int, factor: int) -> tuple[float, int]:
    x = torch.full((), float(rank * factor))
    dist.all_reduce(x)
    return x.item(), os.getpid()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def sleep_for_ever(rank: int, world_size: int) -> None:
    time.sleep(1000)


def test_results_come_back_by_rank() -> None:
    results = run_ranks(total, 2, 10)
    assert [value for value, _ in results] == [10.0, 10.0]
    assert len({pid for _, pid in results} | {os.getpid()}) == 3


def test_an_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 raised.*rank one is unwell"):
        run_ranks(fail_on_one, 2)


def test_a_rank_that_hangs_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0\]"):
        run_ranks(sleep_for_ever, 1, timeout=12)
    assert time.monotonic() - start < 40
