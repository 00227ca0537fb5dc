"""The cores that this process may use, the other programs that want them, and how threads wait.

A matrix product on a CPU is divided among OpenMP threads, which wait for each other at its end.
GNU's OpenMP, which torch's wheels for Linux bring, lets them wait in a loop for some milliseconds
before they sleep. Beside other programs that loop takes the core from the very thread that is
waited for: beside two programs on two cores a training step took four times as long, with a short
loop 2.2 times (docs/log.md). A short loop costs little on a quiet machine. Results do not depend
on it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

SPINS = "GOMP_SPINCOUNT"
QUIET_SPINS, BUSY_SPINS = 10_000, 1_000
"""Turns of the loop: GNU's own number is 300,000, or 1,000 with more threads than cores."""
WAITING = (SPINS, "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
"""Environment variables by which a user decides how threads wait, or how many there are."""
SAMPLES, SAMPLE_SECONDS = 5, 0.004


def num_cores() -> int:
    """Return the number of cores that this process may use.

    This is the number of cores that it is bound to (all, where the system does not tell, as macOS
    does not), or the container's share of them, rounded up, if that is less.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(bound or 1, _quota())))


def other_programs(threads: int = 1) -> int:
    """Return how many threads of other programs want the cores that this process may use.

    These are the threads that run on this machine, except `threads`, less the cores that this
    process may not use: a container, or a job that has a part of a machine, sees all of the
    machine's threads. The smallest of a few counts within 20 ms, so that a program that runs for a
    moment is left out; 0 where the system does not tell (it has no /proc).
    """
    elsewhere = max(0, (os.cpu_count() or 1) - num_cores())
    counts = []
    for number in range(SAMPLES):
        time.sleep(SAMPLE_SECONDS * (number > 0))
        try:
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return 0
    return max(0, min(counts) - threads - elsewhere)


def waiting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which OpenMP threads wait well beside what runs now.

    There are none if the user has set any. They have to be set before torch is imported, and child
    processes inherit them.
    """
    if any(name in environment for name in WAITING):
        return {}
    return {SPINS: str(BUSY_SPINS if other_programs() else QUIET_SPINS)}


def _quota() -> float:
    """Return the cores' worth of time that the container may use; infinity without a limit."""
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:  # the first version of cgroups
            quota = (folder / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu" / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            return int(quota) / int(period)
    return math.inf
