"""A run needs as many bytes as its plan says: it ends with 5 % more besides the interpreter's own,
and fails with 5 % less."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limited_run import NOT_ENOUGH, limited_config

from lather.memory.plan import plan
from lather.memory.workers import Assumed

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": f"{HERE}:{HERE.parent}",
    # gives larger blocks pages of their own, which go back when freed
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_run_needs_what_its_plan_says() -> None:
    needed = plan(limited_config(), 1, Assumed("cpu")).needed
    command = [
        sys.executable,
        str(HERE / "limited_run.py"),
        *(str(int(share * needed)) for share in (1.05, 0.95)),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.split() == ["0", str(NOT_ENOUGH)], done.stderr
