"""Ends the processes of tests if pytest is killed before it could: a process beside it notices that
its pipe is closed."""

from __future__ import annotations

import functools
import subprocess
import sys
from subprocess import Popen
from typing import TypeVar

T = TypeVar("T", str, bytes)

REAPER = """
import os, select, signal

def signaled(pid, number):
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
            return True
        except OSError:
            pass
    return False

started = set()
while True:
    if select.select([0], [], [], 1)[0]:
        numbers = os.read(0, 1 << 16)
        if not numbers:
            break
        started |= {int(number) for number in numbers.split()}
    # the number of one that has ended may come to be another's
    started = {pid for pid in started if signaled(pid, 0)}
for pid in started:
    signaled(pid, signal.SIGKILL)
"""


def reaped(process: Popen[T]) -> Popen[T]:
    """Make the process, and its group if it leads one, end at the latest when this process ends."""
    pipe = _reaper().stdin
    assert pipe is not None
    pipe.write(f"{process.pid}\n")
    pipe.flush()
    return process


@functools.cache
def _reaper() -> Popen[str]:
    return Popen(
        [sys.executable, "-S", "-c", REAPER],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
