"""A process of its own for a command. This imports nothing that takes time: the environment is set
before torch is imported."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lather.processes import end_with_parent


def run_command(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Run `lather ARGUMENTS` in this process, which multiprocessing has started, until its parent
    is gone. Its output is appended to the file `log`."""
    os.setpgrp()  # a terminal's Ctrl-C reaches the parent alone, which asks this process to end
    end_with_parent()
    os.environ |= environment
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["lather", *arguments]
    runpy.run_module("lather", run_name="__main__")
