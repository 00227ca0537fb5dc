"""Runs Python scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_by(
    script: str, *arguments: object, variables: dict[str, str] | None = None, timeout: float = 120
) -> str:
    """Run a script, which must succeed, and return what it prints. Its environment is that of this
    process with `variables`, without those that are empty."""
    environment = {name: x for name, x in {**os.environ, **(variables or {})}.items() if x}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
