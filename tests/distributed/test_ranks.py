"""The helper that starts ranks: results by rank, errors with the rank's traceback, no process left
behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import is_alive
from ranks import run_ranks


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def test_an_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 raised.*rank one is unwell"):
        run_ranks(fail_on_one, 2)


KILLED = """
import os, pathlib, subprocess, sys, time
import forked, ranks, reaper

def wait_for_ever(rank, world_size, folder, command):
    pathlib.Path(folder, "pids.aside").write_text(f"{os.getpid()} {command}")
    pathlib.Path(folder, "pids.aside").rename(pathlib.Path(folder, "pids"))
    time.sleep(1000)

if __name__ == "__main__":
    forked.IMPORTED_BEFORE.clear()
    command = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    process = reaper.reaped(subprocess.Popen(command, start_new_session=True))
    ranks.run_ranks(wait_for_ever, 1, sys.argv[1], process.pid)
"""


def test_what_a_test_has_started_does_not_outlive_a_killed_pytest(tmp_path: Path) -> None:
    script, pids = tmp_path / "killed.py", tmp_path / "pids"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not pids.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while any(is_alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
