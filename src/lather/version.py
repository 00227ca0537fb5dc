"""The version of the package and the commit that it was made from.

The number stands in `lather.__init__` alone. The commit is git's in a checkout; `make dist` writes
it into the wheel and the sdist."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import lather

HERE = Path(__file__).parent
RECORD = "commit.txt"
"""File beside this one in a wheel or an sdist."""


def describe_version() -> str:
    """Return the versions of the package, its commit, torch and Python in a line, without importing
    torch, which takes a while."""
    commit, dash, dirty = (find_commit() or "").partition("-")
    shown = f"{commit[:12]}{dash}{dirty}" or "commit unknown"
    return (
        f"lather {lather.__version__} ({shown}), torch "
        f"{metadata.version('torch')}, Python {platform.python_version()}"
    )


def find_commit() -> str | None:
    """Return the commit of the checkout that tracks the package, with "-dirty" if files differ from
    it; else the commit that the wheel records; else None."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        record = HERE / RECORD
        return record.read_text("utf-8").strip() or None if record.is_file() else None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()
